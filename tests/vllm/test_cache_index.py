"""The index of a vLLM's prefix cache, in its worker and in routers, against the table of vLLM's own block pool."""

import random
from collections.abc import Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from common.block_hash import BlockHashes, hash_blocks, hash_root
from common.ids import BlockHash, HashRoot, WorkerId
from common.kv_events import decode_events, encode_events
from common.prefix_chains import whole_chain
from engine.pages.hot_prefixes import hot_prefixes
from engine.vllm.cache_mirror import CacheMirror, salt_of
from engine.vllm.environment import ENVIRONMENT
from engine.vllm.errands import Errand, ReportReader, StepBegun, StepErrands, encode_report
from engine.vllm.step_book import StepBook
from router.fleet.index import PrefixIndex
from worker.kv_event_hub import KvEventHub, Watcher

BLOCK_SIZE = 4
NUM_BLOCKS = 192
NUM_EVENTS = 100_000
WORKER = WorkerId("decode-0")
ROOTS = [hash_root(model_fingerprint="m", cache_salt=salt) for salt in ("", "a tenant's")]


class Vllm:
    """vLLM's own cache manager, driven as its scheduler does."""

    def __init__(self, chance: random.Random) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._hash_of = get_block_hash
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager: Any = KVCacheManager(
            config,
            max_model_len=1024,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_kv_cache_events=True,
        )
        self._chance = chance
        self._running: list[tuple[Any, HashRoot]] = []
        self._ours: dict[bytes, BlockHash] = {}
        """Our name of each block that a request has had, by vLLM's, from the request's tokens."""
        self._num_requests = 0

    @property
    def seen(self) -> list[BlockHash]:
        """Our names of all blocks so far."""
        return list(self._ours.values())

    def names_in(self, errands: StepErrands) -> tuple[bytes, ...]:
        """Return vLLM's names of the blocks in the pages that a step exports."""
        pages = [self.manager.block_pool.blocks[block_id] for copy in errands.stores for block_id in copy.block_ids]
        return tuple(self._hash_of(page.block_hash) for page in pages)

    @property
    def cached(self) -> set[BlockHash]:
        """Our names of the blocks in the pool's table."""
        table = self.manager.block_pool.cached_block_hash_to_block._cache  # noqa: SLF001 - the truth
        return {self._ours[self._hash_of(key)] for key in table}

    def prompt(self) -> tuple[list[int], HashRoot]:
        """Return a prompt of a few shared beginnings, turns of chats, and ends of its own."""
        chance, root = self._chance, self._chance.choice(ROOTS)
        turns = [chance.randrange(6) for _ in range(chance.randrange(1, 6))]
        tokens = [turn * 100 + i for turn in turns for i in range(3 * BLOCK_SIZE + turn % 3)]
        return tokens + [chance.randrange(5000) for _ in range(chance.randrange(1, 9))], root

    def act(self) -> None:
        """Do one thing that a step may do."""
        kind = self._chance.random()
        if kind < 0.45:
            self._begin()
        elif kind < 0.75 and self._running:
            request, root = self._chance.choice(self._running)
            request.append_output_token_ids([self._chance.randrange(7) for _ in range(self._chance.randrange(1, 6))])
            self._note(request, root)
            self._grow(request)
        elif kind < 0.9995 and self._running:
            self._end(self._chance.randrange(len(self._running)))
        elif kind >= 0.9995:
            while self._running:
                self._end(0)
            assert self.manager.reset_prefix_cache()

    def _begin(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        tokens, root = self.prompt()
        self._num_requests += 1
        request = Request(
            request_id=str(self._num_requests),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=salt_of(root),
            block_hasher=self._hasher,
        )
        self._note(request, root)
        blocks, num_cached, _boundary = self.manager.get_computed_blocks(request)
        # Some have a prefix that was pulled; some compute a chunk.
        most = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE - num_cached
        num_pulled = self._chance.choice((0, most)) if most > 0 else 0
        num_new = self._chance.randrange(1, len(tokens) - num_cached - num_pulled + 1)
        granted = self.manager.allocate_slots(
            request, num_new, num_cached, blocks, num_external_computed_tokens=num_pulled
        )
        if granted is None:
            if self._running:
                self._end(-1)  # preempted
            return
        request.num_computed_tokens = num_cached + num_pulled + num_new
        self._running.append((request, root))

    def _grow(self, request: Any) -> None:
        num_new = request.num_tokens - request.num_computed_tokens
        if self.manager.allocate_slots(request, num_new) is None:
            self._end(next(i for i, (each, _root) in enumerate(self._running) if each is request))
        else:
            request.num_computed_tokens += num_new

    def _end(self, idx: int) -> None:
        self.manager.free(self._running.pop(idx)[0])

    def _note(self, request: Any, root: HashRoot) -> None:
        names = hash_blocks(list(request.all_token_ids), root=root, block_size=BLOCK_SIZE)
        self._ours.update(zip(request.block_hashes, names, strict=True))


class Router:
    """A router's view of the worker over a stream that loses and repeats batches.

    As `router.fleet.link`: a batch out of order ends the subscription, and the next one begins with a snapshot.
    """

    def __init__(self, hub: KvEventHub, mirror: CacheMirror) -> None:
        self.index = PrefixIndex()
        self.num_subscriptions = 0
        self._hub, self._mirror = hub, mirror
        self._held = ExitStack()
        self._subscribe()

    def _subscribe(self) -> None:
        self._held.close()
        self.num_subscriptions += 1
        self._watcher: Watcher = self._held.enter_context(self._hub.watch())
        self._num_sent = self._num_taken = 0
        self._take(0, encode_events(self._mirror.snapshot()))
        self._num_sent = 1

    def _take(self, seq: int, batch: bytes) -> None:
        if seq != self._num_taken:
            self._subscribe()
        else:
            self.index.apply(WORKER, decode_events(batch))
            self._num_taken += 1

    async def read(self, fate: str = "") -> None:
        """Take what has come since the last time; it may be lost, or come twice."""
        batch = encode_events(await self._watcher.next_changes(within_s=0))
        seq, self._num_sent = self._num_sent, self._num_sent + 1
        if fate != "lost":
            self._take(seq, batch)
        if fate == "replayed":
            self._take(seq, batch)

    def holds(self, names: Iterable[BlockHash]) -> set[BlockHash]:
        """Return which of some blocks the worker has, as far as this router knows."""
        return {name for name in names if self.index.match(BlockHashes.of([name])).get(WORKER)}


async def test_indexes_equal_vllms_cache_after_100000_events_with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache has is in the index; what the index names can be exported, from pages with these blocks."""
    monkeypatch.setenv(*next(item for item in ENVIRONMENT.items() if "BLOCK_HASHES" in item[0]))
    chance = random.Random(7)
    vllm, mirror, hub = Vllm(chance), CacheMirror(block_size=BLOCK_SIZE), KvEventHub()
    pool, reports = vllm.manager.block_pool, ReportReader()
    book = StepBook(block_size=BLOCK_SIZE, pool=lambda: pool, tables=lambda _request_id: [])
    routers = [Router(hub, mirror) for _ in range(2)]
    num_events = num_steps = num_exported = 0
    while num_events < NUM_EVENTS:
        for _ in range(chance.randrange(4)):
            vllm.act()
        tokens, root = vllm.prompt()
        hashes = hash_blocks(tokens, root=root, block_size=BLOCK_SIZE)
        names = mirror.vllm_names(hashes)
        if names:
            export = Errand(key=num_steps, slots=tuple(range(len(names))), exports=names).to_params()
            book.opened(SimpleNamespace(request_id="export", num_prompt_tokens=1, kv_transfer_params=export))
        errands, begun = book.plan(SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None), {})
        (told,) = reports.feed(encode_report(begun))
        assert isinstance(told, StepBegun)
        hub.publish(mirror.apply(told))
        num_steps += 1
        num_events += sum(1 if isinstance(change, bytes) else len(change.hashes) for change in told.changes)
        assert mirror.vllm_names(hashes)[: len(names)] == vllm.names_in(errands), "the blocks that are still there"
        num_exported += len(names)
        for router in routers:
            if chance.random() < 0.3:
                await router.read(chance.choices(("", "lost", "replayed"), (0.9, 0.05, 0.05))[0])
        if num_steps % 50 == 0 or num_events >= NUM_EVENTS:
            right = vllm.cached
            assert set(mirror.snapshot().stored) == right, num_steps
            assert mirror.num_blocks == len(right)
            mirror.mark_reused(hashes)
            chains = hot_prefixes(mirror, (), 64)
            for whole in (whole_chain(chains, idx).hashes for idx in range(len(chains))):
                assert set(whole) <= right
                assert mirror.tokens(whole).matches(whole, block_size=BLOCK_SIZE)
            for router in routers:
                await router.read()
                await router.read()  # after a gap, it has subscribed again
                assert router.holds(vllm.seen if num_events >= NUM_EVENTS else right | set(hashes)) == right, num_steps
    assert num_exported > 1000
    assert all(router.num_subscriptions > 100 for router in routers)
