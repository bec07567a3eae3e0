"""Pulls of cached blocks that fail in every way: answers stay right, and nothing is left behind."""

import asyncio
from typing import Any

import pytest

from common.errors import HandoffGone, InvalidRequest, KvrelayError
from common.ids import WorkerId, mint_handoff_id
from common.trust.tickets import PullRight, of_blocks
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc, sequence_pb2, worker_pb2
from tests.builders import make_request
from tests.trust import ROUTER, as_worker
from tests.worker.calls import error_of, messages, until_prefilled
from tests.worker.cluster import Pool, running_pool
from tests.worker.prefixes import OTHERS, PREFIX_BLOCKS, outcomes, prompt, warm_pool, where
from tests.worker.scripted_source import ScriptedSource, scripted_source
from worker.prefix_pull import PrefixPuller, PullOutcome
from worker.serving import RunningWorker


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [({"epoch": 5}, PullOutcome.STALE), ({"address": "127.0.0.1:1", "worker_id": "unknown"}, PullOutcome.LOST)],
)
async def test_pull_from_a_source_that_is_gone_computes_instead(changes: dict[str, Any], outcome: PullOutcome) -> None:
    async with warm_pool() as pool:
        await computes_instead(pool, where(pool.workers["prefill-0"], **changes), outcome)


async def computes_instead(pool: Pool, source: sequence_pb2.KvSource, outcome: PullOutcome) -> None:
    """Serve a request whose prefix cannot be pulled."""
    pair = pool.pair("prefill-1", "decode-0")
    answer = await pair.generate(prompt(2), source)
    assert (answer.num_cached, answer.num_pulled) == (0, 0), "nothing unverified is published"
    assert outcomes(pair.prefill) == {outcome: 1}


async def test_pull_from_a_source_of_another_layout_computes_instead() -> None:
    async with warm_pool() as pool:
        store: Any = pool.workers["prefill-0"].runtime.executor.kv
        store.shape = type(store)(num_blocks=1, block_size=8).shape
        await computes_instead(pool, where(pool.workers["prefill-0"]), PullOutcome.LAYOUT)


async def lie(source: ScriptedSource, _opened: pb.OpenFetch, context: Any) -> None:
    await source.send(context, 0, 4)
    await source.send_manifest(context, PREFIX_BLOCKS)


async def stall(source: ScriptedSource, _opened: pb.OpenFetch, context: Any) -> None:
    await source.send(context, 0, 4)
    source.asked.set()
    await source.may_go_on.wait()
    await source.send(context, 4, PREFIX_BLOCKS)
    await source.send_manifest(context, PREFIX_BLOCKS)


async def test_pull_from_a_source_that_dies_in_the_middle_computes_instead() -> None:
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), stall) as source:
        pulling = asyncio.create_task(computes_instead(pool, source.where(PREFIX_BLOCKS), PullOutcome.LOST))
        await source.asked.wait()
        await source.die()
        await pulling


async def test_pull_from_a_source_that_lies_computes_instead() -> None:
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), lie) as source:
        await computes_instead(pool, source.where(PREFIX_BLOCKS), PullOutcome.INCOMPLETE)


async def test_pull_that_takes_too_long_is_given_up_and_the_source_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[asyncio.Timeout] = []
    fetch = PrefixPuller._land_and_fetch  # noqa: SLF001

    async def noting(self: PrefixPuller, *args: Any) -> PullOutcome:
        limits.append(args[-1])
        return await fetch(self, *args)

    monkeypatch.setattr(PrefixPuller, "_land_and_fetch", noting)
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), stall) as source:
        pulling = asyncio.create_task(computes_instead(pool, source.where(PREFIX_BLOCKS), PullOutcome.TIMEOUT))
        async with asyncio.timeout(60):
            await source.asked.wait()
            assert limits[0].when() is not None
            limits[0].reschedule(0)
            await pulling
            await source.ended.wait()


async def test_pull_keeps_its_result_while_other_requests_are_computed() -> None:
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), stall) as source:
        pair = pool.pair("prefill-1", "decode-0")
        pulling = asyncio.create_task(pair.generate(prompt(2), source.where(PREFIX_BLOCKS)))
        await source.asked.wait()
        other = make_request(range(30), ignore_eos=True)
        await pair.generate(other)
        assert not pulling.done()
        source.may_go_on.set()
        answer = await pulling
        assert (answer.num_cached, answer.num_pulled) == (40, 40)


@pytest.mark.parametrize("canceller", ["router", "decode worker", "router of a local plan"])
async def test_cancel_while_pulling_frees_everything_and_tells_the_source(canceller: str) -> None:
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), stall) as source:
        pair = pool.pair("prefill-1", "decode-0")
        handoff_id = mint_handoff_id()
        where = source.where(PREFIX_BLOCKS)
        if canceller == "router of a local plan":
            decode = pair.open_decode(prompt(2), None, where)
            reading = asyncio.ensure_future(decode.read())
            await source.asked.wait()
            decode.cancel()
            await asyncio.wait([reading])
        else:
            decode = pair.open_decode(prompt(2), handoff_id)
            await decode.read()
            prefill = pair.open_prefill(prompt(2), handoff_id, where)
            await source.asked.wait()
            first, second = (prefill, decode) if canceller == "router" else (decode, prefill)
            first.cancel()
            assert isinstance(await error_of(second), HandoffGone)
        async with asyncio.timeout(60):
            await source.ended.wait()
        await pool.until_empty()
        puller = pair.decode if canceller == "router of a local plan" else pair.prefill
        assert outcomes(puller) == {PullOutcome.CANCELLED: 1}


async def test_pull_without_room_in_the_time_of_computing_computes_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 0.05)
    async with warm_pool(prefill_1={"num_blocks": 20}) as pool:
        pair = pool.pair("prefill-1", "decode-0")
        handoff_id = mint_handoff_id()
        held = make_request(range(44), ignore_eos=True)
        held_call = pair.open_prefill(held, handoff_id)
        await until_prefilled(held_call)  # its 11 pages wait for a puller
        waiting = asyncio.create_task(pair.generate(prompt(2), where(pool.workers["prefill-0"])))
        while not outcomes(pair.prefill):
            await pair.prefill.runtime.engine.call(lambda _core: None)
        assert outcomes(pair.prefill) == {PullOutcome.NO_ROOM: 1}
        async for _message in messages(pair.open_decode(held, handoff_id)):
            pass
        answer = await waiting
        assert answer.num_pulled == 0


async def test_request_pulls_when_another_one_gives_up_the_same_pull() -> None:
    async with running_pool(OTHERS) as pool, scripted_source(prompt(1), stall) as source:
        pair = pool.pair("prefill-1", "decode-0")
        first = asyncio.create_task(pair.generate(prompt(2), source.where(PREFIX_BLOCKS)))
        await source.asked.wait()
        second = asyncio.create_task(pair.generate(prompt(3), source.where(PREFIX_BLOCKS)))
        while pair.prefill.runtime.num_request_tasks < 2:
            await pair.prefill.runtime.engine.call(lambda _core: None)
        source.may_go_on.set()
        first.cancel()
        answer = await second
        assert answer.num_cached == 40


async def fetch_error(worker: RunningWorker, hashes: bytes) -> KvrelayError:
    """Ask a worker for cached blocks, say nothing more, and return the error."""
    runtime = worker.runtime
    right = PullRight(
        puller=WorkerId("prefill-1"), source=runtime.worker_id, epoch=runtime.epoch, subject=of_blocks(hashes)
    )
    opened = pb.OpenFetch(
        epoch=runtime.epoch,
        layout_fingerprint=runtime.executor.kv.shape.fingerprint,
        transports=[worker_pb2.KV_TRANSPORT_GRPC],
        block_hashes=hashes,
        ticket=ROUTER.issue(right),
    )
    async with as_worker(worker.kv_address, "prefill-1") as channel:
        call = kv_transfer_pb2_grpc.KvTransferServiceStub(channel).FetchBlocks()
        await call.write(pb.FetchBlocksRequest(open=opened))
        return await error_of(call)


async def test_lease_of_a_silent_puller_ends_with_the_time_to_live() -> None:
    async with running_pool({"prefill-0": {}, "decode-0": {"lease_ttl_s": 0.1}}) as pool:
        await pool.pair("prefill-0", "decode-0").generate_locally(prompt(1, max_tokens=1))
        error = await fetch_error(pool.workers["decode-0"], prompt(1).block_hashes.packed)
        assert isinstance(error, HandoffGone)


@pytest.mark.parametrize("hashes", [b"", b"x" * 17])
async def test_fetch_of_malformed_hashes_is_refused_by_field(hashes: bytes) -> None:
    async with running_pool(OTHERS) as pool:
        error = await fetch_error(pool.workers["prefill-0"], hashes)
        assert isinstance(error, InvalidRequest)
        assert error.field == "block_hashes"
