"""Pages in device memory that go through a ring in host memory: other processes get them, and slots come back."""

import argparse
import asyncio
import gc
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch

from benchmarks.transports import fill, make_store, pulls_of, shape_of, source
from common.clock import SystemClock
from common.config import TransferConfig
from common.errors import KvIncomplete, KvrelayError
from common.ids import BlockId, Epoch, HandoffId, WorkerId
from engine.device import host_ring
from engine.device.shared_memory import allocate_region, host_id
from engine.thread import EngineDriver
from kv_transfer import serve
from kv_transfer.handoff import Handoff, HandoffManifest, HandoffTable
from kv_transfer.serve import KvTransferService, ServeSettings
from kv_transfer.transports.registry import WorkerTransports
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import worker_pb2
from tests.transfer.scripted_peer import Peer, manifest, plan, pulling

CPU = torch.device("cpu")
NUM_BLOCKS, SLOT_BLOCKS, NUM_PULLERS = 32, 3, 5
SHAPE = shape_of(is_small=True)
BLOCKS = [BlockId(block) for block in range(NUM_BLOCKS)]
ARGUMENTS = argparse.Namespace(blocks=NUM_BLOCKS, rounds=1, device=CPU, small=True)
TAKEN = pb.FetchBlocksRequest(taken=pb.TakenBlocks())
ACK = pb.FetchBlocksRequest(ack=pb.AckFetch())


def num_mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:kvrelay-kv")


async def test_pages_of_another_process_arrive_through_its_ring(tmp_path: Path) -> None:
    store = make_store(SHAPE, NUM_BLOCKS, CPU)
    with source("ring", tmp_path / "kv", ARGUMENTS):
        async with pulls_of("ring", tmp_path / "kv", store) as pulls:
            await pulls.pull()
    assert store.read_blocks(BLOCKS) == fill(make_store(SHAPE, NUM_BLOCKS, CPU))


async def test_pull_from_a_process_killed_while_it_lends_leaves_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(SHAPE, NUM_BLOCKS, CPU)
    before = num_mapped()
    with source("ring", tmp_path / "kv", ARGUMENTS) as process:

        def kill(_pages: Sequence[BlockId], _data: memoryview) -> None:
            process.kill()
            process.wait()

        monkeypatch.setattr(store, "write_blocks", kill)
        async with pulls_of("ring", tmp_path / "kv", store) as pulls:
            with pytest.raises(KvrelayError):
                await pulls.pull()
    assert num_mapped() == before


class Served:
    """A worker with pages in device memory, whose slots are fewer than a transfer needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (host_ring, serve):
            monkeypatch.setattr(module, "PIECE_BYTES", SLOT_BLOCKS * SHAPE.block_bytes)
        self.store = make_store(SHAPE, NUM_BLOCKS, CPU)
        self.sent = fill(self.store)
        self.table = HandoffTable(block_size=SHAPE.block_size, lease_ttl_s=60.0, clock=SystemClock())
        transports = WorkerTransports.configured(TransferConfig(transports=("shm",)), self.store)
        self.settings: dict[str, Any] = {"transports": transports, "epoch": lambda: Epoch(1)}

    def handoff(self, number: int, num_ready_blocks: int) -> Handoff:
        """Begin a handoff of all blocks."""
        handoff = self.table.begin(HandoffId(str(number)), lambda: None)
        self.table.progress(handoff, tuple(BLOCKS), num_ready_blocks * SHAPE.block_size)
        if num_ready_blocks == NUM_BLOCKS:
            manifest = HandoffManifest(
                num_tokens=NUM_BLOCKS * SHAPE.block_size, num_blocks=NUM_BLOCKS, last_block_hash=None, first_tokens=()
            )
            self.table.complete(handoff, manifest)
        return handoff

    async def serve(self, puller: "ScriptedPuller", *, lease_ttl_s: float = 60.0) -> None:
        service = KvTransferService(
            table=self.table,
            engine=cast(EngineDriver, None),
            store=self.store,
            settings=ServeSettings(
                worker_id=WorkerId("prefill-0"),
                check_pull=lambda _source, _opened: None,
                lease_ttl_s=lease_ttl_s,
                **self.settings,
            ),
            track=nullcontext,
            on_bytes=lambda _transport, _count: None,
        )
        await service.FetchBlocks(puller.requests(), cast(Any, puller))


class ScriptedPuller:
    """Both ends of a call: answers as its script says, without end the last way."""

    def __init__(self, served: Served, number: int, *answers: str) -> None:
        self._served = served
        self._number = number
        self._answers = answers
        self._written: asyncio.Queue[pb.FetchBlocksResponse] = asyncio.Queue()
        self.received = bytearray()
        self.num_answered = 0
        self.waits = asyncio.Event()

    async def write(self, message: pb.FetchBlocksResponse) -> None:
        await self._written.put(message)

    async def abort(self, _code: grpc.StatusCode, _details: str, _trailing: Any) -> None:
        raise grpc.aio.AbortError

    async def requests(self) -> AsyncIterator[pb.FetchBlocksRequest]:
        yield pb.FetchBlocksRequest(
            open=pb.OpenFetch(
                handoff_id=str(self._number),
                epoch=1,
                layout_fingerprint=SHAPE.fingerprint,
                transports=[worker_pb2.KV_TRANSPORT_SHM],
                host_id=host_id(),
            )
        )
        assert (await self._written.get()).opened.lends
        while True:
            if self._written.empty():
                self.waits.set()
            message = await self._written.get()
            answer = self._answers[min(self.num_answered, len(self._answers) - 1)]
            if message.WhichOneof("message") == "manifest" or answer == "acknowledges":
                yield ACK
            elif answer == "leaves":
                return
            elif answer == "waits":
                self.waits.set()
                await asyncio.Event().wait()
            else:
                self._read(message.sealed)
                self.num_answered += 1
                yield TAKEN

    def _read(self, blocks: pb.SealedBlocks) -> None:
        ring = self._served.store.host_ring
        assert ring is not None
        size = SHAPE.block_bytes
        self.received += os.pread(ring.region.fd, len(blocks.block_ids) * size, blocks.block_ids[0] * size)


async def all_arrives(served: Served, number: int) -> bool:
    served.handoff(number, NUM_BLOCKS)
    puller = ScriptedPuller(served, number, "takes")
    async with asyncio.timeout(60):
        await served.serve(puller)
    return puller.received == served.sent and puller.num_answered == -(-NUM_BLOCKS // SLOT_BLOCKS)


@pytest.mark.parametrize("answers", [["waits"], ["leaves"], ["acknowledges"], ["takes", "waits"], ["takes", "leaves"]])
async def test_slots_of_pullers_that_do_not_answer_come_back(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(monkeypatch)
    for number in range(NUM_PULLERS):
        served.handoff(number, NUM_BLOCKS)
        async with asyncio.timeout(60):
            with pytest.raises(grpc.aio.AbortError):
                await served.serve(ScriptedPuller(served, number, *answers), lease_ttl_s=0.05)
    assert served.table.num_leases == 0
    assert await all_arrives(served, NUM_PULLERS)


async def test_slots_of_calls_that_are_cancelled_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    for number in range(NUM_PULLERS):
        served.handoff(number, NUM_BLOCKS)
        puller = ScriptedPuller(served, number, "waits")
        call = asyncio.ensure_future(served.serve(puller))
        await puller.waits.wait()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
    assert await all_arrives(served, NUM_PULLERS)


async def test_transfers_that_wait_for_their_prefill_hold_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    pullers = [ScriptedPuller(served, number, "takes") for number in range(NUM_PULLERS)]
    handoffs = [served.handoff(number, SLOT_BLOCKS) for number in range(NUM_PULLERS)]
    calls = [asyncio.ensure_future(served.serve(puller)) for puller in pullers]
    assert await all_arrives(served, NUM_PULLERS)
    for handoff in handoffs:
        served.table.abort(handoff, KvIncomplete("the prefill has failed"))
    await asyncio.wait(calls)
    assert [puller.num_answered for puller in pullers] == [1] * NUM_PULLERS


@pytest.mark.parametrize("places", [[], [1, 0], [7, 8], [4, 6]])
async def test_pull_of_places_that_no_slot_has_raises_kv_incomplete(places: list[int]) -> None:
    _memory, region = allocate_region(8 * 32)
    assert region is not None
    opened = pb.FetchOpened(transport=worker_pb2.KV_TRANSPORT_SHM, lends=True)
    opened.shared_memory.MergeFrom(
        pb.SharedMemory(pid=os.getpid(), fd=region.fd, size_bytes=region.size_bytes, nonce=region.nonce, num_blocks=8)
    )
    sealed = pb.FetchBlocksResponse(sealed=pb.SealedBlocks(first_block=0, block_ids=places))
    async with pulling(Peer([pb.FetchBlocksResponse(opened=opened), sealed, manifest()])) as (puller, _store, channel):
        with pytest.raises(KvIncomplete, match="sealed blocks"):
            await puller.pull(plan(), channel)
