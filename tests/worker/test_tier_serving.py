"""Workers that serve others straight from their tiers: without a page, never a wrong block, within bounded memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from typing import Any, cast

import pytest

from common.block_hash import BlockHashes
from common.clock import SystemClock
from common.config import TransferConfig
from common.ids import Epoch, HashRoot, WorkerId
from common.trust.sealing import root_tag
from common.wire_names import TRANSPORT_NUMBERS
from engine.device.shared_memory import host_id
from engine.fake_pages import FakeKvStore, fake_shape
from engine.steps.landing import Pinned
from engine.thread import EngineDriver
from kv_tiers.tiers import Tiers
from kv_transfer.handoff import HandoffTable
from kv_transfer.offloaded import OffloadedBlocks, OffloadedPiece
from kv_transfer.serve import KvTransferService, ServeSettings
from kv_transfer.transports.registry import WorkerTransports
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import worker_pb2
from tests.builders import BLOCK_SIZE
from tests.worker.cluster import Pool, core_of, running_pool
from tests.worker.prefixes import PREFIX, PREFIX_BLOCKS, outcomes, prompt, where
from tests.worker.test_tier_faults import HungTiers
from tests.worker.test_tiers import NUM_BLOCKS, gauge, settings, until_written
from worker.prefix_pull import PullOutcome
from worker.serving import RunningWorker
from worker.tier_serving import NUM_BUFFERS, NUM_OF_PEER, TierServing

SHAPE = fake_shape(BLOCK_SIZE)
ROOT = HashRoot(b"r" * 32)
HASHES = BlockHashes(b"".join(bytes([i]) * 16 for i in range(8)))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.tier_reads._MAX_PIECE_BLOCKS", 2)


@asynccontextmanager
async def full_source(
    tiers: Tiers, *, num_in_pages: int = 0, transports: tuple[str, ...] = ("grpc",), **prefill: Any
) -> AsyncIterator[Pool]:
    """Start workers, of which prefill-0 has the prefix in tiers, and so many blocks of it in pages: all are in use."""
    first = {"tiers": tiers, "num_blocks": NUM_BLOCKS} | prefill
    async with running_pool({"prefill-0": first, "prefill-1": {}, "decode-0": {}}, transports=transports) as pool:
        source = pool.workers["prefill-0"]
        await pool.pair("prefill-0", "decode-0").generate(prompt(1))
        await until_written(source)
        engine = source.runtime.engine
        held = await engine.pin(prompt(1).block_hashes[:num_in_pages])
        taken = await engine.call(lambda core: core_of(core).pool.allocate(NUM_BLOCKS - num_in_pages))
        yield pool
        await engine.call(lambda core: core_of(core).pool.release(taken))
        await engine.call(lambda core: core.landings.unpin(held))


def serving_of(worker: RunningWorker) -> TierServing:
    tiers = worker.runtime.tiers
    assert tiers is not None
    return tiers.serving


async def until(holds: Callable[[], bool]) -> None:
    """Wait (bounded) for what no event tells."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_in_pages", [0, 3])
@pytest.mark.parametrize("transports", [("grpc",), ("shm", "grpc")], ids=["grpc", "shm"])
async def test_a_worker_without_a_free_page_serves_its_tiers(transports: tuple[str, ...], num_in_pages: int) -> None:
    async with full_source(Tiers.open(settings()), num_in_pages=num_in_pages, transports=transports) as pool:
        source = pool.workers["prefill-0"]
        plain = await pool.pair("prefill-1", "decode-0").generate(prompt(2, max_tokens=4, seed=1))
        async with running_pool({"prefill-2": {}}, transports=transports) as more:
            other = Pool(pool.workers | more.workers, pool.channels | more.channels)
            answer = await other.pair("prefill-2", "decode-0").generate(prompt(2, max_tokens=4, seed=1), where(source))
        assert (answer.num_pulled, answer.tokens) == (len(PREFIX), plain.tokens)
        assert serving_of(source).num_served == PREFIX_BLOCKS - num_in_pages
        via = TRANSPORT_NUMBERS[transports[0]]
        assert set(source.runtime.bytes_sent) == {via}, "out of shared buffers, or in chunks"
        assert gauge(source, "kvrelay_tier_served_blocks_total") == PREFIX_BLOCKS - num_in_pages
        assert source.runtime.load.num_free_blocks == 0


async def test_a_block_that_changed_in_its_tier_is_not_sent_and_the_answer_is_the_same() -> None:
    tiers = Tiers.open(settings())
    async with full_source(tiers) as pool:
        source, pair = pool.workers["prefill-0"], pool.pair("prefill-1", "decode-0")
        host = tiers._open["host"]  # noqa: SLF001
        slot = host.slots.pin(prompt(1).block_hashes[5], root_tag(prompt(1).hash_root))
        assert slot is not None
        host._medium._at(slot)[0] ^= 1  # type: ignore[attr-defined]  # noqa: SLF001
        host.slots.unpin(slot)
        answer = await pair.generate(prompt(2), where(source))
        assert answer.num_pulled == 5 * BLOCK_SIZE
        assert outcomes(pair.prefill) == {PullOutcome.PARTIAL: 1}
        assert tiers.stats().tiers["host"].dropped == {"flipped": 1}
        again = await pair.generate(prompt(2))
        assert again.tokens == answer.tokens


async def test_a_puller_that_goes_away_leaves_nothing_held() -> None:
    hung = HungTiers()
    async with full_source(hung.tiers) as pool:
        source, pair = pool.workers["prefill-0"], pool.pair("prefill-1", "decode-0")
        hung.num_reads_left = 3
        asking = asyncio.create_task(pair.generate(prompt(2), where(source)))
        await until(lambda: hung.num_reads_left == -1)
        root = prompt(2).hash_root
        assert "run it again" in (await source.runtime.forget(root)).trouble, "a block may be on its way"
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        await until(lambda: source.runtime.handoffs.num_leases == 0)
        assert serving_of(source).buffers.num_users == 1, "the thread still has its buffer"
        hung.may_go.set()
        await until(lambda: serving_of(source).buffers.num_users == 0)
        assert not serving_of(source).is_reading(root)


async def test_a_disk_that_hangs_for_a_peer_does_not_hold_up_the_workers_own_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 0.1)
    hung = HungTiers()
    async with full_source(hung.tiers, num_in_pages=0) as pool, asyncio.timeout(60):
        source, pair = pool.workers["prefill-0"], pool.pair("prefill-1", "decode-0")
        hung.num_reads_left = 0
        answer = await pair.generate(prompt(2), where(source))
        assert answer.num_pulled == 0
        assert outcomes(pair.prefill) == {PullOutcome.TIMEOUT: 1}
        tiers = source.runtime.tiers
        assert tiers is not None and tiers.num_worth_reading(prompt(2).block_hashes) > 0
        hung.may_go.set()
        await until(lambda: serving_of(source).buffers.num_users == 0)


async def test_a_source_whose_disk_hangs_sends_what_it_has_before_its_puller_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 60.0)
    hung = HungTiers()
    async with full_source(hung.tiers, lease_ttl_s=0.2) as pool, asyncio.timeout(60):
        source, pair = pool.workers["prefill-0"], pool.pair("prefill-1", "decode-0")
        hung.num_reads_left = 4
        for _ in range(2):
            await pair.generate(prompt(2), where(source))
            await pool.workers["prefill-1"].runtime.forget(prompt(2).hash_root)
        assert outcomes(pair.prefill) == {PullOutcome.PARTIAL: 1, PullOutcome.EVICTED: 1}
        assert serving_of(source).is_stuck
        await pair.generate(prompt(3), where(source))
        assert outcomes(pair.prefill)[PullOutcome.EVICTED] == 2, "a disk that has not answered is not asked again"
        hung.may_go.set()
        await until(lambda: serving_of(source).buffers.num_users == 0)


def held_tiers() -> Tiers:
    """Return tiers with a few blocks."""
    tiers = Tiers.open(settings())
    for i, block_hash in enumerate(HASHES):
        tiers.put(block_hash, ROOT, memoryview(bytes([i]) * SHAPE.block_bytes))
    return tiers


def wanted(puller: str, **changes: Any) -> OffloadedBlocks:
    fields: dict[str, Any] = {"puller": puller, "first_block": 4, "hashes": HASHES, "root": ROOT, "chunk_bytes": 20}
    return OffloadedBlocks(**(fields | changes))


async def test_pieces_of_slow_pullers_are_bounded_for_each_and_in_all() -> None:
    serving = TierServing(held_tiers(), SHAPE, SystemClock(), lambda _num_bytes, _seconds: None)
    async with AsyncExitStack() as held, asyncio.timeout(60):
        pieces: list[OffloadedPiece] = []
        waiting: list[asyncio.Task[None]] = []

        async def take(puller: str) -> None:
            async with serving.piece(wanted(puller)) as piece:
                pieces.append(piece)
                await asyncio.Event().wait()

        for puller in ["slow"] * (NUM_OF_PEER + 2) + ["other"] * NUM_OF_PEER + ["third"]:
            waiting.append(asyncio.create_task(take(puller)))
        await until(lambda: len(pieces) == NUM_BUFFERS)
        assert serving.buffers.num_users == len(waiting)
        assert all(piece.num_blocks == 2 for piece in pieces), "a buffer takes no more"
        waiting[0].cancel()
        await until(lambda: len(pieces) == NUM_BUFFERS + 1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert serving.buffers.num_users == 0
        piece = await held.enter_async_context(serving.piece(wanted("slow")))
        assert b"".join(message.chunk.data for message in piece.messages) == b"".join(
            bytes([i]) * SHAPE.block_bytes for i in range(2)
        )
        assert {message.chunk.block_index for message in piece.messages} == {4, 5}
    serving.close()


class _Offloaded:
    """Tiers that have all blocks."""

    def __init__(self, serving: TierServing) -> None:
        self.piece = serving.piece
        self.staging = serving.staging

    def num_held(self, hashes: BlockHashes, _first_block: int) -> int:
        return len(hashes)


class _Engine:
    """An engine without cached blocks."""

    async def pin(self, _hashes: BlockHashes) -> Pinned:
        return Pinned()

    def post(self, _work: Any) -> None:
        pass


class _Call:
    """A puller's call: it reads all that it is sent, or one message."""

    def __init__(self, *, num_read: int | None = None) -> None:
        self.sent: list[pb.FetchBlocksResponse] = []
        self._num_read = num_read

    async def write(self, message: pb.FetchBlocksResponse) -> None:
        if len(self.sent) == self._num_read:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def abort(self, _code: Any, details: str, _trailing: Any) -> None:
        raise RuntimeError(details)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_a_puller_that_takes_no_blocks_holds_a_buffer_for_the_time_to_live(transport: str) -> None:
    serving = TierServing(held_tiers(), SHAPE, SystemClock(), lambda _num_bytes, _seconds: None)
    store = FakeKvStore(num_blocks=8, block_size=BLOCK_SIZE)
    table = HandoffTable(block_size=BLOCK_SIZE, lease_ttl_s=0.1, clock=SystemClock())
    service = KvTransferService(
        table=table,
        engine=cast("EngineDriver", _Engine()),
        store=store,
        settings=ServeSettings(
            worker_id=WorkerId("prefill-0"),
            check_pull=lambda _source, _opened: None,
            epoch=lambda: Epoch(1),
            transports=WorkerTransports.configured(TransferConfig(transports=(transport,)), store),
            lease_ttl_s=0.1,
            offloaded=_Offloaded(serving),
        ),
        track=nullcontext,
        on_bytes=lambda _transport, _count: None,
    )

    async def requests() -> AsyncIterator[pb.FetchBlocksRequest]:
        opened = pb.OpenFetch(
            epoch=1,
            layout_fingerprint=store.shape.fingerprint,
            transports=[worker_pb2.KvTransport.ValueType(TRANSPORT_NUMBERS[transport])],
            host_id=host_id(),
            block_hashes=HASHES.packed,
            hash_root=ROOT,
        )
        yield pb.FetchBlocksRequest(open=opened)
        await asyncio.Event().wait()

    call: Any = _Call(num_read=None if transport == "shm" else 1)
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="puller"):
            await service.FetchBlocks(requests(), call)
    assert [message.WhichOneof("message") for message in call.sent] == ["opened", "staged"][: len(call.sent)]
    assert len(call.sent) == (2 if transport == "shm" else 1)
    assert serving.buffers.num_users == 0
    assert table.num_leases == 0
    serving.close()


async def test_a_puller_that_names_another_tenants_root_gets_nothing() -> None:
    serving = TierServing(held_tiers(), SHAPE, SystemClock(), lambda _num_bytes, _seconds: None)
    async with serving.piece(wanted("prefill-1", root=HashRoot(b"s" * 32))) as piece:
        assert (piece.num_blocks, list(piece.messages)) == (0, [])
    serving.close()


async def test_tiers_that_fail_as_nobody_expects_serve_nothing() -> None:
    tiers = held_tiers()

    def fail(*_args: Any) -> None:
        raise RuntimeError("a fault of the tiers")

    tiers.get = fail  # type: ignore[assignment,method-assign]
    serving = TierServing(tiers, SHAPE, SystemClock(), lambda _num_bytes, _seconds: None)
    async with serving.piece(wanted("slow")) as piece:
        assert (piece.num_blocks, list(piece.messages)) == (0, [])
    assert serving.buffers.num_users == 0
    serving.close()
