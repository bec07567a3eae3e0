"""Messages of a worker to a router: its identity, and KV events in batches of msgpack."""

import asyncio
from typing import Any, cast

import grpc
import msgpack
from google.protobuf.message import DecodeError

from common.ids import WorkerId
from kvrelay.v1 import router_admin_pb2, worker_pb2, worker_pb2_grpc
from measure.simulate.network import SimServer
from tests.fuzz.callers import right_metadata
from tests.fuzz.messages import Hints, Source, draw
from tests.fuzz.services import ROUTER
from tests.fuzz.target import Target
from tests.fuzz.world import World, set_workers_request

_LIAR = WorkerId("decode-1")
_LIES_FOR_S = 3.0
_HASHES = (b"", b"a" * 16, b"b" * 32, b"c" * 15, b"d" * 16 * 300, None, 7, "text", [b"a" * 16])


def _batch(source: Source) -> bytes:
    """Return a batch of events, right or wrong."""
    way = source.byte() % 8
    if way == 7:
        return source.take(source.below(200))
    batch: dict[str, Any] = {"v": 1, "snap": source.below(2) == 0}
    batch["add"], batch["del"] = source.choose(_HASHES[1:]), source.choose(_HASHES)
    if way == 6:
        batch["add"] = source.take(source.below(8) * 16)
    if way == 5:
        batch[source.choose(("v", "snap", "add", "del", "more"))] = source.choose(
            (None, 2, 2**63, -1, 1.5, b"", {}, [])
        )
    if way == 4:
        del batch[source.choose(("v", "snap", "add", "del"))]
    for name in ("page", "unpage", "off"):
        if source.below(2):
            batch[name] = source.choose(_HASHES)
    raw = bytes(msgpack.packb(batch))
    return raw[: source.below(len(raw))] if way == 3 else raw


_HINTS: Hints = {
    "worker_id": (_LIAR, "decode-0"),
    "epoch": (1, 2),
    "role": (1, 2),
    "block_size": (4, 0, 8),
    "fingerprint": ("fake-v1-4", "other"),
    "seq": (0, 1, 2, 3),
    "window_tokens": (0, 1, 9, 2**32 - 1),
    "num_samples": (0, 1, 100, 2**63),
    "max_step_tokens": (0, 1, 32),
    "prefill_backlog_s": (0.0, 1.0),
    "accepted_request_ids": ("req-1",),
}


class _Liar(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that says what it was told to."""

    def __init__(self, described: worker_pb2.DescribeWorkerResponse, updates: list[Any]) -> None:
        self._described = described
        self._updates = updates

    async def DescribeWorker(self, request: Any, context: Any) -> Any:
        return self._described

    async def WatchWorker(self, request: Any, context: Any) -> None:  # type: ignore[override]
        for update in self._updates:
            await context.write(update)
            await asyncio.sleep(0.01)
        await asyncio.sleep(_LIES_FOR_S)

    async def GetWorkerStatus(self, request: Any, context: Any) -> Any:
        return worker_pb2.GetWorkerStatusResponse()


class WatchTarget(Target):
    """A worker of the membership whose description and updates are anything at all."""

    name = "worker-updates"

    def prepare(self, world: World, data: bytes) -> _Liar:
        """Return the worker."""
        source = Source(data)
        described = worker_pb2.DescribeWorkerResponse()
        described.CopyFrom(_truth(world))
        if source.byte() % 4 == 3:
            described = _parsed(draw(source, [described], _HINTS), worker_pb2.DescribeWorkerResponse) or described
        updates = []
        for seq in range(source.below(5) + 1):
            update = worker_pb2.WatchWorkerResponse(epoch=described.epoch, seq=seq, kv_events=_batch(source))
            update.load.CopyFrom(worker_pb2.LoadReport(num_free_blocks=64, num_blocks=64))
            update.timing.CopyFrom(worker_pb2.TimingReport(max_step_tokens=32))
            updates.append(_parsed(draw(source, [update], _HINTS), worker_pb2.WatchWorkerResponse) or update)
        return _Liar(described, updates)  # type: ignore[abstract]

    async def play(self, world: World, plan: Any) -> list[str]:
        """Let the router follow it for a while, beside those that tell the truth."""
        server = SimServer()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(plan, cast("grpc.aio.Server", server))
        world.network.listen("liar:1", server)
        members = set_workers_request(world)
        members.workers.append(
            router_admin_pb2.WorkerEndpoint(worker_id=_LIAR, role=worker_pb2.WORKER_ROLE_DECODE, address="liar:1")
        )
        method = "/kvrelay.v1.RouterAdminService/SetWorkers"
        admin = world.channel()(ROUTER).unary_unary(method)
        await admin(members, metadata=right_metadata(method, ROUTER))
        await asyncio.sleep(_LIES_FOR_S)
        return []

    async def restore(self, world: World) -> None:
        """Take it out of the membership."""
        await world.restore()
        await asyncio.sleep(_LIES_FOR_S)
        world.network.crash("liar:1")


def _truth(world: World) -> worker_pb2.DescribeWorkerResponse:
    """Return what a good worker of that name says of itself."""
    described = worker_pb2.DescribeWorkerResponse()
    described.CopyFrom(world.decode.describe())
    described.worker_id, described.epoch, described.role = _LIAR, 1, worker_pb2.WORKER_ROLE_DECODE
    return described


def _parsed(raw: bytes, kind: Any) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError:
        return None
