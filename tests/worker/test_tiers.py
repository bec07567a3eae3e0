"""Tiers of workers: blocks that have left the pages come back, also after a restart, for the same answers."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.kv_events import decode_events
from common.process import CannotStart
from engine.fake_pages import FakeWindow, fake_shape
from kv_tiers.tiers import TierSettings
from kvrelay.v1 import worker_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.worker.cluster import Pool, make_runtime, running_pool, until_empty, watched
from tests.worker.prefixes import PREFIX, PREFIX_BLOCKS, prompt, where
from worker.prefix_pull import PullOutcome
from worker.service import WorkerService
from worker.serving import RunningWorker
from worker.worker_tiers import WorkerTiers

SHAPE = fake_shape(BLOCK_SIZE)
ROOM = 4096
"""Blocks of a tier that never fills."""
NUM_BLOCKS = 32
_DISK_SLOT = 8192
"""More than a small block takes on disk."""


def settings(path: Path | None = None, *, num_blocks: int = ROOM) -> TierSettings:
    """Return the settings of a tier for so many blocks: on disk with a path, else in memory."""
    size = num_blocks * SHAPE.block_bytes
    return TierSettings(
        host_bytes=0 if path else size,
        disk_bytes=num_blocks * _DISK_SLOT if path else 0,
        path=path,
        fingerprint=SHAPE.fingerprint,
        block_bytes=SHAPE.block_bytes,
    )


def workers(path: Path | None = None, **prefill: Any) -> dict[str, dict[str, Any]]:
    """Return a prefill worker with tiers and few pages, and workers without."""
    tiered = {"tiers": settings(path), "num_blocks": NUM_BLOCKS} | prefill
    return {"prefill-0": tiered, "prefill-1": {}, "decode-0": {}}


async def until_written(worker: RunningWorker) -> None:
    """Wait (bounded) until every block that was published is in the tiers, or has gone."""
    tiers = worker.runtime.tiers
    assert tiers is not None
    await until_empty(worker)
    async with asyncio.timeout(60):
        while tiers.num_waiting:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.001)


@contextmanager
def held_writes(worker_tiers: WorkerTiers) -> Iterator[None]:
    """Let nothing be written into the tiers inside the block."""
    may_go = threading.Event()
    work_off = worker_tiers._work_off  # noqa: SLF001

    def held(*args: Any) -> int:
        assert may_go.wait(60)
        return work_off(*args)

    worker_tiers._work_off = held  # type: ignore[assignment,method-assign]  # noqa: SLF001
    try:
        yield
    finally:
        may_go.set()


def gauge(worker: RunningWorker, name: str) -> float | None:
    """Return a metric of a prefill worker."""
    return worker.registry.get_sample_value(name, {"worker": worker.runtime.worker_id, "role": "prefill"})


async def fill_pages(pool: Pool) -> None:
    """Let other prompts take all pages of prefill-0."""
    for first in range(2):
        other = make_request([first + 11] * (NUM_BLOCKS * BLOCK_SIZE - 8), max_tokens=1, ignore_eos=True)
        await pool.pair("prefill-0", "decode-0").generate(other)


@pytest.mark.parametrize("is_on_disk", [False, True], ids=["host", "disk"])
async def test_blocks_that_left_the_pages_come_back_from_a_tier(tmp_path: Path, is_on_disk: bool) -> None:
    async with running_pool(workers(tmp_path if is_on_disk else None)) as pool:
        pair, worker = pool.pair("prefill-0", "decode-0"), pool.workers["prefill-0"]
        first = await pair.generate(prompt(1))
        await until_written(worker)
        await fill_pages(pool)
        again = await pair.generate(prompt(1))
        assert again.num_cached == len(PREFIX) + 4  # all full blocks but that of the last token
        assert again.tokens == first.tokens
        assert worker.runtime.prefixes.tier_outcomes == {PullOutcome.PULLED: 1}


async def test_a_restarted_worker_has_the_blocks_of_its_predecessor(tmp_path: Path) -> None:
    async with running_pool(workers(tmp_path)) as pool:
        first = await pool.pair("prefill-0", "decode-0").generate(prompt(1))
    async with running_pool(workers(tmp_path)) as pool:
        async with watched(pool, "prefill-0") as updates:
            events = decode_events((await updates.read()).kv_events)
        assert set(prompt(1).block_hashes[:PREFIX_BLOCKS]) <= set(events.stored)
        assert set(events.offloaded) == set(events.stored)
        again = await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        assert (again.num_cached, again.tokens) == (len(PREFIX) + 4, first.tokens)


async def test_another_worker_pulls_what_its_source_has_offloaded() -> None:
    async with running_pool(workers()) as pool:
        source = pool.workers["prefill-0"]
        await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        await until_written(source)
        await fill_pages(pool)
        answer = await pool.pair("prefill-1", "decode-0").generate(prompt(2), where(source))
        assert answer.num_pulled == len(PREFIX)
        assert source.runtime.prefixes.tier_outcomes == {PullOutcome.PULLED: 1}


async def test_routers_hear_where_blocks_are() -> None:
    wanted = set(prompt(1).block_hashes[:PREFIX_BLOCKS])
    async with running_pool(workers()) as pool, watched(pool, "prefill-0") as updates:
        await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        await until_written(pool.workers["prefill-0"])
        await fill_pages(pool)
        stored, offloaded = set[bytes](), set[bytes]()
        async with asyncio.timeout(60):
            while not wanted <= offloaded:
                update = await updates.read()
                events = decode_events(update.kv_events) if update.kv_events else None
                if events is None:
                    continue
                assert not wanted & set(events.removed)
                stored |= set(events.stored)
                offloaded = (offloaded - set(events.stored)) | set(events.offloaded)
        assert wanted <= stored


async def test_another_tenant_reads_nothing_of_the_first_ones_blocks() -> None:
    async with running_pool(workers()) as pool:
        pair, worker = pool.pair("prefill-0", "decode-0"), pool.workers["prefill-0"]
        await pair.generate(prompt(1))
        await until_written(worker)
        await fill_pages(pool)
        other = await pair.generate(make_request([*PREFIX, *([1] * 7)], salt="other", ignore_eos=True))
        assert other.num_cached == 0
        assert not worker.runtime.prefixes.tier_outcomes


async def test_blocks_of_pages_given_away_before_their_turn_are_counted() -> None:
    async with running_pool(workers()) as pool:
        worker = pool.workers["prefill-0"]
        tiers = worker.runtime.tiers
        assert tiers is not None
        with held_writes(tiers):
            await pool.pair("prefill-0", "decode-0").generate(prompt(1))
            await fill_pages(pool)
        await until_written(worker)
        assert tiers.num_missed > 0
        assert not any(block_hash in tiers.tiers for block_hash in prompt(1).block_hashes)


async def test_worker_whose_tier_folder_cannot_be_used_serves_and_its_status_says_why(tmp_path: Path) -> None:
    (taken := tmp_path / "taken").write_text("not a folder")
    async with running_pool(workers(taken)) as pool:
        answer = await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        assert answer.tokens
        reporter = WorkerService(pool.workers["prefill-0"].runtime)
        status = await reporter.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), None)  # type: ignore[arg-type]
        (alarm,) = status.status.load.tier_alarms
        assert "disk tier is off" in alarm
        assert str(taken) in alarm
        assert gauge(pool.workers["prefill-0"], "kvrelay_tier_alarms") == 1


async def test_a_model_with_window_pages_refuses_tiers() -> None:
    with pytest.raises(CannotStart, match=r"tiers\.host_gib"):
        make_runtime(
            worker_pb2.WORKER_ROLE_PREFILL,
            "prefill-0",
            transports=("grpc",),
            tiers=settings(),
            window=FakeWindow(num_tokens=10, num_pages=60),
        )
