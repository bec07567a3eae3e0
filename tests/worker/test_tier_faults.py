"""Tiers that hang, or fail as nobody expects: requests, transfers and the end of a worker do not wait for them."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from common.block_hash import BlockHashes
from common.errors import HandoffGone
from common.ids import BlockHash, HandoffId, HashRoot
from kv_tiers.tiers import Tiers
from prefill_worker import service
from tests.builders import BLOCK_SIZE
from tests.worker.cluster import running_pool
from tests.worker.prefixes import PREFIX, PREFIX_BLOCKS, prompt, where
from tests.worker.test_tiers import NUM_BLOCKS, fill_pages, settings, until_written
from worker.prefix_pull import PullOutcome


class HungTiers:
    """Tiers whose reads or writes hang on demand."""

    def __init__(self) -> None:
        self.tiers = Tiers.open(settings())
        self.num_reads_left: int | None = None
        """Reads that still succeed; None: all."""
        self.may_go = threading.Event()
        self._get = self.tiers.get
        self.tiers.get = self._read  # type: ignore[method-assign]

    def _read(self, block_hash: BlockHash, root: HashRoot) -> bytes | memoryview | None:
        if self.num_reads_left is not None:
            self.num_reads_left -= 1
            if self.num_reads_left < 0:
                assert self.may_go.wait(60)
        return self._get(block_hash, root)

    def hang_writes(self) -> None:
        """Let nothing be written until the test says so."""
        put = self.tiers.put

        def held(*args: Any) -> None:
            assert self.may_go.wait(60)
            put(*args)

        self.tiers.put = held  # type: ignore[assignment,method-assign]


@pytest.fixture
def hung() -> Iterator[HungTiers]:
    tiers = HungTiers()
    yield tiers
    tiers.may_go.set()  # no thread is left waiting, however the test ends


async def test_a_read_that_hangs_is_given_up_and_what_has_come_is_used(
    hung: HungTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 0.1)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # by which transfers move their bytes
    fakes: dict[str, dict[str, Any]] = {"prefill-0": {"tiers": hung.tiers, "num_blocks": NUM_BLOCKS}, "decode-0": {}}
    async with running_pool(fakes) as pool:
        pair, worker = pool.pair("prefill-0", "decode-0"), pool.workers["prefill-0"]
        await pair.generate(prompt(1))
        await until_written(worker)
        await fill_pages(pool)
        hung.num_reads_left = 4
        async with asyncio.timeout(30):
            answer = await pair.generate(prompt(1))
            assert answer.num_cached == 4 * BLOCK_SIZE
            assert worker.runtime.prefixes.tier_outcomes == {PullOutcome.TIMEOUT: 1}
            await fill_pages(pool)
            again = await pair.generate(prompt(2))
            forgotten = await worker.runtime.forget(prompt(1).hash_root)
        assert again.num_cached == 0, "a disk that has not answered is not asked again"
        assert "given up" in forgotten.trouble, "it may bring a block back"
        hung.num_reads_left = None
        hung.may_go.set()
        await until_written(worker)
        await fill_pages(pool)
        async with asyncio.timeout(30):
            while not (await pair.generate(prompt(3))).num_cached:
                await fill_pages(pool)


async def test_requests_for_one_prefix_read_it_once_though_the_second_comes_late(
    hung: HungTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.tier_reads._MAX_PIECE_BLOCKS", 2)
    fakes: dict[str, dict[str, Any]] = {"prefill-0": {"tiers": hung.tiers, "num_blocks": NUM_BLOCKS}, "decode-0": {}}
    async with running_pool(fakes) as pool, asyncio.timeout(60):
        pair, worker = pool.pair("prefill-0", "decode-0"), pool.workers["prefill-0"]
        await pair.generate(prompt(1, max_tokens=1))
        await until_written(worker)
        await fill_pages(pool)
        hung.num_reads_left = 4
        first = asyncio.create_task(pair.generate(prompt(2)))
        while hung.num_reads_left >= 0:  # noqa: ASYNC110 - a thread counts it
            await asyncio.sleep(0.001)
        looked, tiers = asyncio.Event(), worker.runtime.tiers
        assert tiers is not None
        look = tiers.num_worth_reading

        def noted(hashes: BlockHashes) -> int:
            looked.set()
            return look(hashes)

        monkeypatch.setattr(tiers, "num_worth_reading", noted)
        second = asyncio.create_task(pair.generate(prompt(3)))
        await looked.wait()
        for _ in range(10):
            await worker.runtime.engine.call(lambda _core: None)
        hung.may_go.set()
        answers = await asyncio.gather(first, second)
        assert [answer.num_cached for answer in answers] == [len(PREFIX)] * 2
        assert hung.num_reads_left == 4 - PREFIX_BLOCKS
        assert worker.runtime.prefixes.tier_outcomes == {PullOutcome.PULLED: 1, PullOutcome.PRESENT: 1}


async def test_pages_of_a_read_that_was_given_up_are_not_written_any_more(
    hung: HungTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 0.1)
    fakes: dict[str, dict[str, Any]] = {"prefill-0": {"tiers": hung.tiers, "num_blocks": NUM_BLOCKS}, "decode-0": {}}
    async with running_pool(fakes) as pool:
        pair, worker = pool.pair("prefill-0", "decode-0"), pool.workers["prefill-0"]
        await pair.generate(prompt(1))
        await until_written(worker)
        await fill_pages(pool)
        hung.num_reads_left = 0
        written: list[Any] = []
        monkeypatch.setattr(worker.runtime.executor.kv, "write_blocks", lambda *args: written.append(args))
        assert (await pair.generate(prompt(1))).num_cached == 0
        hung.may_go.set()
        async with asyncio.timeout(30):
            while worker.runtime.tiers._reads.is_stuck:  # type: ignore[union-attr]  # noqa: ASYNC110, SLF001
                await asyncio.sleep(0.001)
        assert not written


async def test_a_worker_stops_though_a_write_into_its_tier_hangs(
    hung: HungTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.tier_writes._FLUSH_S", 0.05)
    hung.hang_writes()
    async with running_pool({"prefill-0": {"tiers": hung.tiers}, "decode-0": {}}, ends_empty=False) as pool:
        await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        async with asyncio.timeout(30):
            await pool.workers["prefill-0"].runtime.aclose()
        assert not hung.may_go.is_set()
        hung.may_go.set()


@pytest.mark.parametrize("method", ["get", "put", "touch"])
async def test_a_fault_of_tiers_that_nobody_expects_costs_blocks_only(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    tiers = Tiers.open(settings())
    fakes: dict[str, dict[str, Any]] = {
        "prefill-0": {"tiers": tiers, "num_blocks": NUM_BLOCKS},
        "prefill-1": {},
        "decode-0": {},
    }

    def fail(*_args: Any) -> None:
        raise PermissionError(f"injected into {method}")

    async with running_pool(fakes) as pool:
        pair, worker = pool.pair("prefill-0", "decode-0"), pool.workers["prefill-0"]
        await pair.generate(prompt(1))
        await until_written(worker)
        await fill_pages(pool)
        with monkeypatch.context() as patch:
            patch.setattr(tiers, method, fail)
            await pair.generate(prompt(1))
            await fill_pages(pool)
            await pool.pair("prefill-1", "decode-0").generate(prompt(2), where(worker))
            await until_written(worker)
        await fill_pages(pool)
        await pair.generate(prompt(3))
        await until_written(worker)
        await fill_pages(pool)
        assert (await pair.generate(prompt(3))).num_cached >= len(PREFIX), "tiers work again"


async def test_a_prefill_that_is_cancelled_twice_ends_after_its_reads() -> None:
    may_end, began, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def read() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            await may_end.wait()
            ended.set()

    async def call() -> None:
        with ExitStack() as pages:
            pages.callback(lambda: released.append(ended.is_set()))
            await service._unless_aborted(handoff, read())  # noqa: SLF001

    released: list[bool] = []
    async with running_pool({"prefill-0": {}}) as pool:
        handoffs = pool.workers["prefill-0"].runtime.handoffs
        handoff = handoffs.begin(HandoffId("0" * 32), lambda: None)
        calling = asyncio.create_task(call())
        await began.wait()
        for _ in range(3):
            calling.cancel()
            for _turn in range(5):
                await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait([calling])
        assert released == [True], "pages went while they were written"
        handoffs.abort(handoff, HandoffGone("the test is over"))
