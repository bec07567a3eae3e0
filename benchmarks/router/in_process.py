"""The parts that need no second process: hashing, the index, the whole decision."""

import asyncio
import gc
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.figures import Figures, quantile, times_us
from benchmarks.router.children import PLAIN
from benchmarks.router.memory import random_hashes
from common.block_hash import BlockHashes, hash_blocks, hash_probe, hash_root
from common.clock import SystemClock
from common.config import RouterConfig
from common.errors import Refused
from common.ids import Epoch, RequestId, WorkerId
from common.kv_events import KvEvents, decode_events, encode_events
from common.tokens import TokenArray, as_tokens
from common.trust.authority import Authority
from common.trust.channels import Reach
from common.trust.credentials import Credentials
from common.trust.identity import Role
from kvrelay.v1 import worker_pb2
from router.fleet.facts import WorkerEndpoint, WorkerFacts
from router.fleet.index import PrefixIndex
from router.line.wait import Wait
from router.parts import RouterParts, build_router
from router.placement.plans import PlacementRequest
from router.record.ticket import Ticket

ROOT = hash_root(model_fingerprint="benchmark")
BLOCK_SIZE = 16
TTL_S = 1e9
_WARM_UP = 20
"""Decisions before those that are counted."""


def measure_hashing(figures: Figures, rng: random.Random, *, lengths: Sequence[int]) -> None:
    """One round: tokens to hashes and the index's keys, for prompts of these lengths."""
    for num_tokens in lengths:
        tokens = as_tokens(rng.choices(range(50_000), k=num_tokens))
        samples = times_us(partial(_hash, tokens), num_calls=30)
        figures.add("hashing", f"{num_tokens} tokens", "kvrelay", us_p50=quantile(samples, 0.5))


def _hash(tokens: TokenArray) -> list[int]:
    return hash_blocks(tokens, root=ROOT, block_size=BLOCK_SIZE).keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Size of an index that is measured."""

    num_workers: int
    num_blocks: int
    """Blocks of a prompt."""
    total_blocks: int
    """Approximate number of different blocks of all prompts."""


def prompts_on(
    index: PrefixIndex, workers: Sequence[WorkerId], rng: random.Random, filling: Filling
) -> list[BlockHashes]:
    """Fill an index as the benchmark's description says; returns the prompts."""
    num_blocks = filling.num_blocks
    shared = random_hashes(rng, num_blocks // 8)
    prompts = []
    for _ in range(max(4, filling.total_blocks // num_blocks)):
        prompt = shared + random_hashes(rng, num_blocks - len(shared))
        prompts.append(prompt)
        index.apply(rng.choice(workers), KvEvents(stored=prompt))
        for worker_id in rng.sample(workers, 3):
            index.apply(worker_id, KvEvents(stored=prompt[: num_blocks // 2]))
    for worker_id in workers:
        index.apply(worker_id, KvEvents(stored=shared))
    return prompts


def measure_lookups(figures: Figures, rng: random.Random, filling: Filling) -> None:
    """One round: a match alone; a match with every worker's number; verifying the best; expecting the prompt."""
    index = PrefixIndex()
    workers = [WorkerId(f"worker-{number}") for number in range(filling.num_workers)]
    prompts = prompts_on(index, workers, rng, filling)
    for prompt in prompts:
        assert prompt.keys  # a request makes them once, when it is hashed
    turns = itertools.cycle(rng.choices(prompts, k=997))
    case = f"{filling.num_blocks} blocks × {filling.num_workers} workers"
    matching = times_us(lambda: index.match(next(turns)), num_calls=2000)
    listing = times_us(lambda: index.match(next(turns)).items(), num_calls=500)
    verifying = times_us(lambda: _verify_best(index, next(turns)), num_calls=200)
    expecting = times_us(lambda: index.expect(rng.choice(workers), next(turns), expires_s=TTL_S), num_calls=50)
    figures.add("index", f"match, {case}", "kvrelay", us_p50=quantile(matching, 0.5), us_p99=quantile(matching, 0.99))
    figures.add("index", f"match, all workers' numbers, {case}", "kvrelay", us_p50=quantile(listing, 0.5))
    figures.add("index", f"match and verify, {case}", "kvrelay", us_p50=quantile(verifying, 0.5))
    figures.add("index", f"expect, {case}", "kvrelay", us_p50=quantile(expecting, 0.5))


def _verify_best(index: PrefixIndex, prompt: BlockHashes) -> None:
    matches = index.match(prompt)
    worker_id = max(matches, key=matches.get)
    assert matches.verify(worker_id)


def measure_updates(figures: Figures, rng: random.Random, *, num_workers: int, batch: int, num_blocks: int) -> None:
    """One round: msgpack batches into the index, out of it again, and the death of a worker."""
    index = PrefixIndex()
    workers = [WorkerId(f"worker-{number}") for number in range(num_workers)]
    hashes = [random_hashes(rng, batch) for _ in range(num_blocks // batch)]
    stored = [encode_events(KvEvents(stored=part)) for part in hashes]
    removed = [encode_events(KvEvents(removed=part)) for part in hashes]
    case = f"batches of {batch} × {num_workers} workers"
    for name, messages in (("stored", stored), ("removed", removed)):
        gc.collect()
        owners = itertools.cycle(workers)
        cpu_s, longest_s = time.process_time(), 0.0
        for raw in messages:
            started_s = time.perf_counter()
            index.apply(next(owners), decode_events(raw))
            longest_s = max(longest_s, time.perf_counter() - started_s)
        cpu_s = time.process_time() - cpu_s
        figures.add(
            "index", f"{name}, {case}", "kvrelay", million_blocks_per_s=num_blocks / cpu_s / 1e6,
            longest_call_ms=longest_s * 1e3,
        )  # fmt: skip
        if name == "stored":
            _measure_removal(figures, index, workers, case)
            for number, raw in enumerate(stored):
                index.apply(workers[number % num_workers], decode_events(raw))


def _measure_removal(figures: Figures, index: PrefixIndex, workers: Sequence[WorkerId], case: str) -> None:
    """Let a worker die; what reminds of it goes with the next changes, of nothing here."""
    samples = times_us(lambda: index.drop(workers[0]), num_calls=1)
    samples += times_us(lambda: index.apply(workers[-1], KvEvents()), num_calls=index.num_blocks // 4096 + 2)
    figures.add("index", f"dead worker, {case}", "kvrelay", longest_call_ms=max(samples) / 1e3)


def measure_memory(figures: Figures, *, num_workers: int, batch: int, num_blocks: int) -> None:
    """One round, in a fresh process: resident memory of a filled index, its keys included."""
    arguments = [str(number) for number in (num_workers, batch, num_blocks)]
    command = [sys.executable, "-m", "benchmarks.router.memory", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures.add(
        "index", f"memory, batches of {batch} × {num_workers} workers", "kvrelay", bytes_per_block=float(done.stdout)
    )


def measure_decisions(figures: Figures, rng: random.Random, filling: Filling, *, policy: str, num_calls: int) -> None:
    """One round: choose, book and release, so many times."""
    walls, cpus = asyncio.run(_decide(rng, filling, policy=policy, num_calls=num_calls))
    figures.add(
        "decision",
        f"{filling.num_blocks * BLOCK_SIZE} tokens × {filling.num_workers} workers",
        policy,
        us_p50=quantile(walls, 0.5),
        us_p99=quantile(walls, 0.99),
        CPU_us_p50=quantile(cpus, 0.5),
        CPU_us_p99=quantile(cpus, 0.99),
    )


async def _decide(
    rng: random.Random, filling: Filling, *, policy: str, num_calls: int
) -> tuple[list[float], list[float]]:
    # Nothing is awaited before the end, so the links to the workers, which do not exist, never begin to run.
    router = make_router(policy)
    workers = join(router, filling.num_workers, num_blocks=100_000, num_free_blocks=100_000)
    num_blocks = filling.num_blocks
    prompts = prompts_on(router.index, workers, rng, filling)
    walls: list[float] = []
    cpus: list[float] = []
    ticket = router.admission.admit()
    assert isinstance(ticket, Ticket), ticket
    for number in range(_WARM_UP + num_calls):
        known = rng.choice(prompts)[: num_blocks * 3 // 4]
        hashes = known + random_hashes(rng, num_blocks - len(known))
        request = PlacementRequest(
            request_id=RequestId(f"req-{number}"),
            num_tokens=num_blocks * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            hashes=hashes,
        )
        wait = Wait(ticket=ticket, request=request)
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        booking = router.chooser.choose(wait)
        cpu_s, wall_s = time.thread_time() - started_cpu_s, time.perf_counter() - started_s
        assert not isinstance(booking, Refused), booking
        booking.release()
        if number >= _WARM_UP:
            walls.append(wall_s * 1e6)
            cpus.append(cpu_s * 1e6)
    await router.fleet.aclose()
    return walls, cpus


def make_router(policy: str, **config: object) -> RouterParts:
    """Return a router without doors and workers."""
    reach = Reach.of(Credentials.of(Authority.new(PLAIN), Role.ROUTER, "router-0"))
    settings = RouterConfig.model_validate({"policy": policy, **config})
    return build_router(settings, clock=SystemClock(), reach=reach, seed=1)


def join(router: RouterParts, num_workers: int, *, num_blocks: int, num_free_blocks: int) -> list[WorkerId]:
    """Let workers, half of them for prefill, join and report."""
    roles = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
    router.fleet.set_workers(
        [
            WorkerEndpoint(worker_id=WorkerId(f"worker-{number}"), role=roles[number % 2], address="127.0.0.1:1")
            for number in range(num_workers)
        ]
    )
    snapshot = encode_events(KvEvents(is_snapshot=True))
    report = worker_pb2.LoadReport(num_free_blocks=num_free_blocks, num_blocks=num_blocks)
    for member in router.fleet.members:
        router.fleet.on_described(member, _facts(member.endpoint, num_blocks))
        update = worker_pb2.WatchWorkerResponse(seq=0, kv_events=snapshot, load=report)
        router.fleet.on_update(member, update)
    return [member.endpoint.worker_id for member in router.fleet.members]


def _facts(endpoint: WorkerEndpoint, num_blocks: int) -> WorkerFacts:
    return WorkerFacts(
        worker_id=endpoint.worker_id,
        epoch=Epoch(1),
        role=endpoint.role,
        model_name="benchmark",
        fingerprint="benchmark",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        vocab_size=50_000,
        max_model_len=1 << 20,
        hash_probe=hash_probe(ROOT, BLOCK_SIZE),
    )
