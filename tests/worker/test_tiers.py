"""Tiers of workers: blocks that have left the pages come back, also after a restart, for the same answers."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import TiersConfig
from common.ids import mint_handoff_id
from common.kv_events import decode_events
from common.process import CannotStart
from engine.fake_pages import FakeWindow, fake_shape
from engine.request import EngineRequest
from kv_tiers.tiers import Tiers, TierSettings
from kvrelay.v1 import sequence_pb2, worker_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.worker.calls import allowed, messages, spec_of, until_prefilled
from tests.worker.cluster import Pool, core_of, make_runtime, running_pool, until_empty, until_taken_in, watched
from tests.worker.prefixes import PREFIX, PREFIX_BLOCKS, outcomes, prompt, where
from worker.prefix_pull import PrefixPuller, PullOutcome
from worker.service import WorkerService
from worker.serving import RunningWorker

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
        while tiers.writes.num_waiting:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.001)


@contextmanager
def held_calls(owner: object, method: str) -> Iterator[None]:
    """Let calls of a method, made in threads, wait for the end of the block."""
    may_go = threading.Event()
    call = getattr(owner, method)

    def held(*args: Any) -> Any:
        assert may_go.wait(60)
        return call(*args)

    setattr(owner, method, held)
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


async def test_room_of_two_tiers_is_that_of_the_larger_one_since_both_have_the_same(tmp_path: Path) -> None:
    both = replace(settings(tmp_path, num_blocks=8), host_bytes=4 * SHAPE.block_bytes)
    room = Tiers.open(both)
    sizes = [counts.capacity for counts in room.stats().tiers.values()]
    room.close()
    async with running_pool({"prefill-0": {"tiers": both, "num_blocks": NUM_BLOCKS}, "decode-0": {}}) as pool:
        await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        await until_written(pool.workers["prefill-0"])
        assert gauge(pool.workers["prefill-0"], "kvrelay_tier_blocks_max") == max(sizes) < sum(sizes)


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


async def test_a_disk_that_comes_back_gets_what_host_memory_took_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_tiers.health.RETRY_S", 0.0)
    path = tmp_path / "tiers"
    path.write_text("not a folder")
    both = replace(settings(path), host_bytes=ROOM * SHAPE.block_bytes)
    async with running_pool({"prefill-0": {"tiers": both, "num_blocks": NUM_BLOCKS}, "decode-0": {}}) as pool:
        pair, worker = pool.pair("prefill-0", "decode-0"), pool.workers["prefill-0"]
        first = await pair.generate(prompt(1))
        await until_written(worker)
        path.unlink()
        await pair.generate(make_request([9] * (2 * BLOCK_SIZE), max_tokens=1))
        await until_written(worker)
        assert worker.runtime.tiers is not None
        counts = worker.runtime.tiers.tiers.stats().tiers
        assert counts["disk"].blocks == counts["host"].blocks > PREFIX_BLOCKS
    async with running_pool(workers(path)) as pool:
        again = await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        assert (again.num_cached, again.tokens) == (len(PREFIX) + 4, first.tokens)


async def test_a_prompt_waits_for_pages_into_which_its_blocks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixPuller, "_longest_s", lambda _self, _landing: 60.0)
    async with running_pool(workers()) as pool:
        pair, worker = pool.pair("prefill-0", "decode-0"), pool.workers["prefill-0"]
        await pair.generate(prompt(1))
        await until_written(worker)
        await fill_pages(pool)
        engine, outcomes = worker.runtime.engine, worker.runtime.prefixes.tier_outcomes
        taken = await engine.call(lambda core: core_of(core).pool.allocate(NUM_BLOCKS - 2))
        asking = asyncio.create_task(pair.generate(prompt(1)))
        await until_taken_in(worker, 1)
        for _ in range(3):  # steps in which there is no room
            await engine.call(lambda core: core.load())
        assert not asking.done() and not outcomes
        await engine.call(lambda core: core_of(core).pool.release(taken))
        assert (await asking).num_cached == len(PREFIX) + 4
        assert outcomes == {PullOutcome.PULLED: 1}


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


@pytest.mark.parametrize("is_kept", [True, False])
async def test_pulled_blocks_that_another_worker_keeps_are_not_written(is_kept: bool) -> None:
    async with running_pool({"prefill-0": {}, "decode-0": {"tiers": settings()}}) as pool:
        pair, request = pool.pair("prefill-0", "decode-0"), prompt(2)
        prefill = pair.open_prefill(prompt(1, max_tokens=1), mint_handoff_id())
        await until_prefilled(prefill)  # its blocks are in prefill-0 alone
        prefill.cancel()
        spec = spec_of(request)
        if not is_kept:
            spec.retention = sequence_pb2.RETENTION_BRIEF
        call = pair.open_decode_of(spec, source=allowed(where(pair.prefill), request, pair.decode))
        async for _message in messages(call):
            pass
        assert outcomes(pair.decode) == {PullOutcome.PULLED: 1}
        await until_written(pair.decode)
        assert pair.decode.runtime.tiers is not None
        assert (request.block_hashes[0] in pair.decode.runtime.tiers.tiers) is is_kept


async def test_blocks_of_pages_given_away_before_their_turn_are_counted() -> None:
    async with running_pool(workers()) as pool:
        worker = pool.workers["prefill-0"]
        tiers = worker.runtime.tiers
        assert tiers is not None
        with held_calls(tiers.writes, "_work_off"):
            await pool.pair("prefill-0", "decode-0").generate(prompt(1))
            await fill_pages(pool)
        await until_written(worker)
        assert tiers.writes.num_missed > 0
        assert not any(block_hash in tiers.tiers for block_hash in prompt(1).block_hashes)


async def forget(worker: RunningWorker, request: EngineRequest) -> worker_pb2.ForgetBlocksResponse:
    """Let a worker forget the blocks of a request's tenant."""
    asked = worker_pb2.ForgetBlocksRequest(hash_root=request.hash_root)
    return await WorkerService(worker.runtime).ForgetBlocks(asked, None)  # type: ignore[arg-type]


async def test_a_forgotten_tenant_finds_nothing_and_the_others_what_is_theirs(tmp_path: Path) -> None:
    other = make_request([*PREFIX, *([1] * 7)], salt="other", ignore_eos=True)
    async with running_pool(workers(tmp_path, num_blocks=128)) as pool:
        pair, worker = pool.pair("prefill-0", "decode-0"), pool.workers["prefill-0"]
        first = await pair.generate(prompt(1))
        await pair.generate(other)
        await until_written(worker)
        forgotten = await forget(worker, prompt(1))
        num_blocks = len(PREFIX) // BLOCK_SIZE + 1
        assert (forgotten.num_tier_blocks, forgotten.num_page_blocks, forgotten.trouble) == (num_blocks, num_blocks, "")
        async with asyncio.timeout(60):
            while worker.runtime.load.num_tier_blocks != num_blocks:  # noqa: ASYNC110 - no step tells it
                await asyncio.sleep(0.001)
        async with watched(pool, "prefill-0") as updates:
            held = set(decode_events((await updates.read()).kv_events).stored)
        assert not held & set(prompt(1).block_hashes)
        assert held >= set(other.block_hashes[:PREFIX_BLOCKS])
        again = await pair.generate(prompt(1))
        assert (again.num_cached, again.tokens) == (0, first.tokens)
        assert (await pair.generate(other)).num_cached > 0
        assert (await pair.generate(prompt(1))).num_cached > 0, "new blocks are kept as before"
        await until_written(worker)
        await forget(worker, prompt(1))
    async with running_pool(workers(tmp_path)) as pool:
        assert (await pool.pair("prefill-0", "decode-0").generate(prompt(1))).num_cached == 0


async def test_forgotten_blocks_that_are_being_written_stay_away() -> None:
    async with running_pool(workers()) as pool:
        worker = pool.workers["prefill-0"]
        tiers = worker.runtime.tiers
        assert tiers is not None
        with held_calls(tiers.tiers, "put"):  # after the check that the page still has the block
            await pool.pair("prefill-0", "decode-0").generate(prompt(1))
            await until_empty(worker)
            forgetting = asyncio.create_task(forget(worker, prompt(1)))
            async with asyncio.timeout(60):
                while (await worker.runtime.snapshot()).stored:  # noqa: ASYNC110 - no event tells it
                    await asyncio.sleep(0.001)
        assert (await forgetting).trouble == ""
        await until_written(worker)
        assert not any(block_hash in tiers.tiers for block_hash in prompt(1).block_hashes)


async def test_forgetting_says_what_may_be_left() -> None:
    async with running_pool(workers()) as pool:
        worker = pool.workers["prefill-0"]
        await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        await until_written(worker)
        engine = worker.runtime.engine
        pinned = await engine.pin(prompt(1).block_hashes)
        assert "run it again when they have ended" in (await forget(worker, prompt(1))).trouble
        await engine.call(lambda core: core.landings.unpin(pinned))
        assert (await forget(worker, prompt(1))).trouble == ""


async def test_forgetting_without_the_disk_says_so(tmp_path: Path) -> None:
    (taken := tmp_path / "taken").write_text("not a folder")
    async with running_pool(workers(taken)) as pool:
        assert "disk tier is off" in (await forget(pool.workers["prefill-0"], prompt(1))).trouble


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


async def test_forget_tells_of_files_that_tiers_left_before_they_were_turned_off(tmp_path: Path) -> None:
    async with running_pool({"prefill-0": {}}) as pool:
        runtime = pool.workers["prefill-0"].runtime
        runtime.config = runtime.config.model_copy(update={"tiers": TiersConfig(path=tmp_path)})
        assert (await runtime.forget(prompt(1).hash_root)).trouble == ""
        (tmp_path / "blocks").touch()
        assert f"{tmp_path} still has files: remove it" in (await runtime.forget(prompt(1).hash_root)).trouble


async def test_a_model_with_window_pages_refuses_tiers() -> None:
    with pytest.raises(CannotStart, match=r"tiers\.host_gib"):
        make_runtime(
            worker_pb2.WORKER_ROLE_PREFILL,
            "prefill-0",
            transports=("grpc",),
            tiers=settings(),
            window=FakeWindow(num_tokens=10, num_pages=60),
        )
