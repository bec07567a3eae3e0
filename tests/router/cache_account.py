"""Random requests with marks over several workers and routers, beside a reference account of what each should be told.

Requests go the way of real ones without the network: a router's record makes the worker's message, the worker's reader
makes the engine's request, and an engine with few pages serves it. The reference knows of a worker only the blocks that
it has reported as stored or removed, and keeps pins in plain dictionaries.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from common.block_hash import hash_blocks
from common.ids import BlockHash, RequestId
from common.lifecycle import LifeCycle
from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.core import EngineCore
from engine.events import Started, Tokens
from engine.pages.cache_pins import MAX_PINNED_SHARE
from kvrelay.v1 import decode_pb2, sampling_pb2
from router.record.account import Account, open_account
from router.record.cache_use import prompt_marks
from router.record.record import Job, RunningRequest
from router.record.ticket import Ticket
from router.tenants import NO_TERMS, Tenant
from tests.builders import BLOCK_SIZE, Collector, make_core
from tests.clock import ManualClock
from tests.router.fake_worker import MODEL
from worker.request import engine_request

NUM_BLOCKS = 96
TTLS = (300.0, 1800.0, 3600.0)
Told = tuple[int, tuple[tuple[float, int], ...], int, int]
"""Cached tokens, written tokens by time, pinned tokens, and refused ones."""


@dataclass(slots=True)
class Ledger:
    """The reference for one worker."""

    block_bytes: int
    stored: set[BlockHash] = field(default_factory=set)
    pins: dict[str, dict[BlockHash, tuple[float, float]]] = field(default_factory=dict)
    """By tenant and block: until when, and for how long after a use."""

    def pinned(self, now_s: float) -> set[BlockHash]:
        """Return the blocks that are here and that some tenant has pinned."""
        lasting = {each for pins in self.pins.values() for each, (until_s, _) in pins.items() if until_s > now_s}
        return lasting & self.stored

    def expected(self, job: Job, given: list[tuple[int, float]], tenant: Tenant, now_s: float) -> Told:
        """Return what a request has to be told, and renew its pins."""
        hashes, num_tokens = list(job.prompt_hashes), len(job.prompt_token_ids)
        usable = hashes[: (num_tokens - 1) // BLOCK_SIZE]
        num_cached = next((i for i, each in enumerate(usable) if each not in self.stored), len(usable))
        pins = self.pins.setdefault(tenant.name, {})
        for all_pins in self.pins.values():
            for each in [
                each for each, (until_s, _) in all_pins.items() if until_s <= now_s or each not in self.stored
            ]:
                del all_pins[each]
        for each in usable[:num_cached]:
            if each in pins:
                pins[each] = now_s + pins[each][1], pins[each][1]
        writes: dict[float, int] = {}
        num_pinned = num_marked = 0
        is_full = not tenant.cache_bytes
        for place, each in enumerate(usable):
            covering = [ttl_s for end, ttl_s in given if end >= (place + 1) * BLOCK_SIZE]
            if not covering:
                break
            num_marked += 1
            ttl_s = max(covering)
            if place >= num_cached:
                writes[ttl_s] = writes.get(ttl_s, 0) + BLOCK_SIZE
            if each not in pins and not is_full:
                pinned = {known for all_pins in self.pins.values() for known in all_pins}
                is_full = len(pins) >= tenant.cache_bytes // self.block_bytes or (
                    each not in pinned and len(pinned) >= MAX_PINNED_SHARE * NUM_BLOCKS
                )
            if not is_full:
                ttl_s = max(ttl_s, pins.get(each, (0.0, 0.0))[1])
                pins[each] = max(now_s + ttl_s, pins.get(each, (0.0, 0.0))[0]), ttl_s
                num_pinned += 1
        refused = (num_marked - num_pinned) * BLOCK_SIZE
        ordered = tuple(sorted(writes.items(), reverse=True))
        return num_cached * BLOCK_SIZE, ordered, num_pinned * BLOCK_SIZE, refused


class Cluster:
    """Workers with few pages, and routers that know nothing of each other."""

    def __init__(self, *, num_workers: int, num_routers: int, seed: int) -> None:
        self.random, self.clock = Random(seed), ManualClock()
        cores = [make_core(num_blocks=NUM_BLOCKS, max_step_tokens=512, clock=self.clock) for _ in range(num_workers)]
        block_bytes = cores[0].executor.kv.shape.block_bytes
        self.workers: list[tuple[EngineCore, Ledger]] = [(core, Ledger(block_bytes)) for core in cores]
        self.tenants = [
            Tenant(name=name, cache_salt=salt, cache_gib=num_blocks * block_bytes / (1 << 30))
            for name, salt, num_blocks in (("a", "", 40), ("b", "b", 12), ("c", "c", 0), ("d", "", 20))
        ]
        self.accounts: list[dict[str, Account]] = [
            {each.name: open_account(each, now_s=0.0) for each in self.tenants} for _ in range(num_routers)
        ]
        self.prompts = [[self.random.randrange(1, 99) for _ in range(120)] for _ in range(12)]

    def served(self, num_requests: int) -> Iterator[tuple[Told, Told]]:
        """Yield what each of some requests was told, and what it should have been."""
        for _ in range(num_requests):
            yield self._serve()

    def _serve(self) -> tuple[Told, Told]:
        draw = self.random
        self.clock.advance(draw.choice((0.0, 1.0, 20.0, 400.0)))
        tenant, accounts = draw.choice(self.tenants), draw.choice(self.accounts)
        core, ledger = draw.choice(self.workers)
        prompt = draw.choice(self.prompts)[: draw.randrange(1, 120)] + [draw.randrange(1, 99)] * draw.randrange(1, 20)
        given = [(draw.randrange(0, len(prompt) + 1), draw.choice(TTLS)) for _ in range(draw.choice((0, 0, 1, 2, 4)))]
        record = self._record(prompt, given, accounts[tenant.name])
        now_s = self.clock.monotonic()
        pinned = ledger.pinned(now_s)
        expected = ledger.expected(record.job, given, tenant, now_s)
        sink = Collector()
        core.add(engine_request(record.sequence(range(1)), core.executor), sink)
        while core.has_work:
            for _group, event in core.step():
                sink(event)
        self._deliver(record, sink)
        events = core.report().kv_events
        ledger.stored = (ledger.stored | set(events.stored)) - set(events.removed)
        own = set(record.job.hashes(record.ledger.output(0)))
        assert pinned <= ledger.stored or ledger.stored <= pinned | own, "pinned blocks went before others"
        usage = record.usage
        writes = tuple(sorted(((each.ttl_s, each.num_tokens) for each in usage.cache_writes), reverse=True))
        return (usage.num_cached_tokens, writes, usage.num_pinned_tokens, usage.num_refused_pin_tokens), expected

    def _record(self, prompt: list[int], given: list[tuple[int, float]], account: Account) -> RunningRequest:
        """Return a router's record of a request."""
        model, request_id = MODEL.keyed(b"", cache_salt=account.tenant.cache_salt), RequestId("r")
        marks = prompt_marks(given, num_prompt_tokens=len(prompt), block_size=BLOCK_SIZE)
        job = Job(
            request_id=request_id,
            prompt_token_ids=as_tokens(prompt),
            prompt_hashes=hash_blocks(prompt, root=model.root, block_size=BLOCK_SIZE),
            sampling=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
            model=model,
            marks=tuple(marks),
        )
        ticket = Ticket(number=0, account=account, terms=NO_TERMS, received_s=0.0, on_close=lambda _ticket: None)
        return RunningRequest(job, ticket, LifeCycle(request_id, self.clock), self.clock)

    @staticmethod
    def _deliver(record: RunningRequest, sink: Collector) -> None:
        """Take an engine's events as an attempt does."""
        for event in sink.events:
            if isinstance(event, Started):
                record.num_cached_tokens = event.num_cached_tokens
            elif isinstance(event, Tokens):
                tokens = [
                    sampling_pb2.SampleToken(token_index=each.token_index, token_id=each.token_id)
                    for each in event.tokens
                ]
                record.deliver(decode_pb2.TokenBatch(tokens=tokens), expected=range(1))
                record.note_pinned(event.num_pinned_tokens)
