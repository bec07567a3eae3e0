"""The serving side against a puller that stops reading: the pages are not pinned for ever."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any, cast

import grpc
import pytest

from common.clock import SystemClock
from common.config import TransferConfig
from common.ids import BlockId, Epoch, HandoffId, WorkerId
from engine.fake_pages import FakeKvStore
from engine.thread import EngineDriver
from kv_transfer.handoff import FirstToken, HandoffManifest, HandoffTable
from kv_transfer.serve import KvTransferService, ServeSettings
from kv_transfer.transports.registry import WorkerTransports
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import worker_pb2


class StalledContext:
    """A call whose peer reads the first message and nothing else."""

    def __init__(self) -> None:
        self.status: grpc.StatusCode | None = None
        self.num_written = 0

    async def write(self, _message: Any) -> None:
        if self.num_written == 1:
            await asyncio.Event().wait()
        self.num_written += 1

    async def abort(self, code: grpc.StatusCode, _details: str, _trailing: Any) -> None:
        self.status = code
        raise grpc.aio.AbortError


class NoEngine:
    """An engine that is not asked for anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def service_of(store: FakeKvStore, table: HandoffTable, engine: EngineDriver | None) -> KvTransferService:
    return KvTransferService(
        table=table,
        engine=engine,
        store=store,
        settings=ServeSettings(
            worker_id=WorkerId("prefill-0"),
            check_pull=lambda _source, _opened: None,
            epoch=lambda: Epoch(1),
            transports=WorkerTransports.configured(TransferConfig(transports=("grpc",), chunk_bytes=4096), store),
            lease_ttl_s=0.05,
        ),
        track=nullcontext,
        on_bytes=lambda _transport, _count: None,
    )


async def test_pull_of_cached_blocks_where_there_is_no_engine_is_refused_by_name() -> None:
    store = FakeKvStore(num_blocks=8, block_size=4)
    table = HandoffTable(block_size=4, lease_ttl_s=0.05, clock=SystemClock())

    async def requests() -> AsyncIterator[pb.FetchBlocksRequest]:
        opened = pb.OpenFetch(epoch=1, layout_fingerprint=store.shape.fingerprint, block_hashes=b"h" * 16)
        yield pb.FetchBlocksRequest(open=opened)

    context: Any = StalledContext()
    with pytest.raises(grpc.aio.AbortError):
        await service_of(store, table, None).FetchBlocks(requests(), context)
    assert context.status is grpc.StatusCode.INVALID_ARGUMENT
    assert table.num_leases == 0


async def test_fetch_when_the_puller_stops_reading_ends_after_the_time_to_live() -> None:
    store = FakeKvStore(num_blocks=8, block_size=4)
    table = HandoffTable(block_size=4, lease_ttl_s=0.05, clock=SystemClock())
    service = service_of(store, table, cast(EngineDriver, NoEngine()))
    freed: list[str] = []
    handoff = table.begin(HandoffId("ho-1"), lambda: freed.append("pages"))
    table.progress(handoff, (BlockId(3), BlockId(5)), 8)
    first = FirstToken(sample_index=0, token_id=7, finished=False)
    table.complete(handoff, HandoffManifest(num_tokens=8, num_blocks=2, last_block_hash=None, first_tokens=(first,)))

    async def requests() -> AsyncIterator[pb.FetchBlocksRequest]:
        opened = pb.OpenFetch(
            handoff_id="ho-1",
            epoch=1,
            layout_fingerprint=store.shape.fingerprint,
            transports=[worker_pb2.KV_TRANSPORT_GRPC],
        )
        yield pb.FetchBlocksRequest(open=opened)

    context: Any = StalledContext()
    async with asyncio.timeout(60):
        with pytest.raises(grpc.aio.AbortError):
            await service.FetchBlocks(requests(), context)
    assert context.status is grpc.StatusCode.ABORTED
    assert freed == ["pages"]
    assert table.num_leases == 0
