"""Blocks that are read from tiers before their request comes: for whom there is room, and what becomes of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.block_hash import BlockHashes
from common.errors import InvalidRequest, StaleEpoch
from common.ids import BlockHash, HashRoot
from engine.request import EngineRequest
from kvrelay.v1 import prefix_pb2, prefix_pb2_grpc
from tests.builders import make_request
from tests.clock import ManualClock
from tests.rpc import answer_of
from tests.trust import as_router
from tests.worker.cluster import Pool, core_of, running_pool, until_empty, until_taken_in
from tests.worker.prefixes import PREFIX, PREFIX_BLOCKS, prompt
from tests.worker.test_tiers import NUM_BLOCKS, fill_pages, held_calls, until_written, workers
from worker.prefix_pull import PrefixPuller, PullOutcome
from worker.read_ahead import AheadBlocks
from worker.serving import RunningWorker

ALL = NUM_BLOCKS // 4
"""Blocks of one tenant that are read ahead while there are no others."""


async def read_ahead(worker: RunningWorker, request: EngineRequest, **changes: Any) -> int:
    """Ask a worker, as a router, to read the blocks of a request; returns how many came."""
    fields: dict[str, Any] = {
        "hash_root": request.hash_root,
        "block_hashes": request.block_hashes[:PREFIX_BLOCKS].packed,
        "epoch": worker.runtime.epoch,
        "time_limit_s": 60.0,
    }
    async with as_router(worker.address) as channel:
        stub = prefix_pb2_grpc.PrefixServiceStub(channel)
        response = await answer_of(stub.ReadAhead(prefix_pb2.ReadAheadRequest(**(fields | changes))))
    return int(response.num_read_blocks)


@asynccontextmanager
async def with_offloaded(*requests: EngineRequest) -> AsyncIterator[tuple[Pool, RunningWorker]]:
    """Yield workers, and prefill-0, which has the blocks of these requests in its tiers only."""
    async with running_pool(workers()) as pool:
        worker = pool.workers["prefill-0"]
        for request in requests:
            await pool.pair("prefill-0", "decode-0").generate(request)
            await until_written(worker)
        await fill_pages(pool)
        await until_empty(worker)
        yield pool, worker


async def until_pages_are_held(worker: RunningWorker) -> None:
    async with asyncio.timeout(60):
        while not (await worker.runtime.engine.call(lambda core: core.load())).num_used_blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def num_in_pages(worker: RunningWorker, request: EngineRequest) -> int:
    return await worker.runtime.engine.call(lambda core: len(core_of(core).pool.match_prefix(request.block_hashes)))


def uses(worker: RunningWorker) -> tuple[int, int]:
    """Return how many blocks that were read ahead were used and wasted."""
    return worker.runtime.read_ahead.blocks.num_used, worker.runtime.read_ahead.blocks.num_wasted


async def test_request_finds_the_blocks_that_were_read_before_it_came() -> None:
    async with with_offloaded(prompt(1)) as (pool, worker):
        assert await num_in_pages(worker, prompt(1)) == 0
        assert await read_ahead(worker, prompt(1)) == await num_in_pages(worker, prompt(1)) == ALL
        await until_empty(worker)  # nothing holds them
        answer = await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        assert answer.num_cached == len(PREFIX) + 4  # the rest was read when it came
        assert uses(worker) == (ALL, 0)
        assert worker.runtime.read_ahead.outcomes == {PullOutcome.PULLED: 1}
        assert await read_ahead(worker, prompt(1)) == 0
        assert worker.runtime.read_ahead.outcomes[PullOutcome.PRESENT] == 1


async def test_request_that_comes_during_the_read_waits_for_it_and_reads_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefixPuller, "_longest_s", lambda _self, _landing: 60.0)
    async with with_offloaded(prompt(1)) as (pool, worker):
        assert worker.runtime.tiers is not None
        with held_calls(worker.runtime.tiers.tiers, "get"):
            reading = asyncio.create_task(read_ahead(worker, prompt(1)))
            await until_pages_are_held(worker)
            asking = asyncio.create_task(pool.pair("prefill-0", "decode-0").generate(prompt(1)))
            await until_taken_in(worker, 2)
        assert await reading == ALL
        assert (await asking).num_cached == len(PREFIX) + 4
        assert uses(worker) == (ALL, 0)


async def test_blocks_read_ahead_leave_their_pages_like_others_and_count_as_wasted() -> None:
    async with with_offloaded(prompt(1)) as (pool, worker):
        await read_ahead(worker, prompt(1))
        await fill_pages(pool)
        assert await num_in_pages(worker, prompt(1)) == 0
        assert uses(worker) == (0, ALL)


async def test_pages_that_are_in_use_or_just_computed_are_not_taken_for_blocks_read_ahead() -> None:
    async with with_offloaded(prompt(1)) as (_pool, worker):
        engine = worker.runtime.engine
        taken = await engine.call(lambda core: core_of(core).pool.allocate(NUM_BLOCKS - 2))
        assert await read_ahead(worker, prompt(1)) == 2
        await engine.call(lambda core: core_of(core).pool.release(taken))
        assert worker.runtime.read_ahead.outcomes == {PullOutcome.PULLED: 1}


async def test_another_tenant_cannot_have_the_blocks_of_the_first_one_read() -> None:
    other = make_request([*PREFIX, *([1] * 7)], salt="other", ignore_eos=True)
    async with with_offloaded(prompt(1)) as (_pool, worker):
        assert await read_ahead(worker, prompt(1), hash_root=other.hash_root) == 0
        assert await num_in_pages(worker, prompt(1)) == 0
        assert worker.runtime.read_ahead.outcomes == {PullOutcome.EVICTED: 1}
        assert not worker.runtime.prefixes._roots, "a made-up root is not remembered"  # noqa: SLF001


async def test_a_cancelled_call_stops_reading_and_holds_nothing() -> None:
    async with with_offloaded(prompt(1)) as (pool, worker):
        tiers = worker.runtime.tiers
        assert tiers is not None
        with held_calls(tiers.tiers, "get"):
            reading = asyncio.create_task(read_ahead(worker, prompt(1)))
            await until_pages_are_held(worker)
            reading.cancel()
            await until_empty(worker)
        assert await num_in_pages(worker, prompt(1)) == 0
        assert worker.runtime.read_ahead.outcomes == {PullOutcome.CANCELLED: 1}
        answer = await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        assert answer.tokens


async def test_a_disk_that_hangs_costs_the_time_limit_and_no_error() -> None:
    async with with_offloaded(prompt(1)) as (_pool, worker):
        assert worker.runtime.tiers is not None
        with held_calls(worker.runtime.tiers.tiers, "get"):
            assert await read_ahead(worker, prompt(1), time_limit_s=0.01) == 0
        assert worker.runtime.read_ahead.outcomes == {PullOutcome.TIMEOUT: 1}


async def test_a_worker_without_tiers_reads_nothing() -> None:
    async with running_pool({"prefill-0": {}}) as pool:
        assert await read_ahead(pool.workers["prefill-0"], prompt(1)) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hash_root", bytes(31)),
        ("block_hashes", b""),
        ("block_hashes", bytes(17)),
        ("block_hashes", bytes(16 * 65537)),
        ("time_limit_s", 0.0),
        ("time_limit_s", float("inf")),
    ],
)
async def test_a_bad_value_is_refused_by_field(field: str, value: object) -> None:
    async with running_pool({"prefill-0": {}}) as pool:
        with pytest.raises(InvalidRequest) as caught:
            await read_ahead(pool.workers["prefill-0"], prompt(1), **{field: value})
        assert caught.value.field == field


async def test_another_life_of_the_worker_is_not_asked() -> None:
    async with running_pool({"prefill-0": {}}) as pool:
        with pytest.raises(StaleEpoch):
            await read_ahead(pool.workers["prefill-0"], prompt(1), epoch=1)


def some(first: int, count: int) -> BlockHashes:
    return BlockHashes.of(BlockHash(number.to_bytes(16, "big")) for number in range(first, first + count))


def test_each_tenant_leaves_room_for_the_next_one_and_gets_it_back() -> None:
    clock = ManualClock(0.0)
    blocks, a, b = AheadBlocks(64, clock), HashRoot(b"a" * 32), HashRoot(b"b" * 32)
    assert blocks.room_of(a) == 16
    blocks.add(some(0, 16), a)
    assert (blocks.room_of(a), blocks.room_of(b)) == (0, 8)
    blocks.use(some(0, 10))
    assert (blocks.num_used, blocks.room_of(a)) == (10, 10)
    clock.advance(61.0)
    assert (blocks.room_of(a), blocks.num_wasted) == (16, 6)
    blocks.use(some(0, 16))
    assert (blocks.num_used, blocks.num_wasted) == (10, 6)
