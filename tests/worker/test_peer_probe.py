"""A worker that tries a peer says whether that worker answered, and nothing of what else is there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.errors import InvalidRequest, Overloaded
from common.ports import free_port
from common.trust.identity import Role
from kvrelay.v1 import kv_transfer_pb2_grpc
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.kv_transfer_pb2 import DescribePagesResponse
from tests.trust import reach_as
from tests.worker.scripted_source import serve_blocks
from worker.peers import MAX_PROBES, PeerProbe

BOUND_S = 0.3
CONNECT = reach_as(Role.WORKER, "decode-0").worker
OURS = pb.KvLayout(fingerprint="a", block_size=16)
PEER = DescribePagesResponse(worker_id="prefill-0", layout=OURS)
STRANGER = DescribePagesResponse(worker_id="prefill-0", layout=pb.KvLayout(fingerprint="b", block_size=16))


class Peer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    def __init__(self, described: DescribePagesResponse, may_answer: asyncio.Event) -> None:
        self._described = described
        self._may_answer = may_answer
        self.asked = asyncio.Semaphore(0)

    async def DescribePages(self, request: Any, context: Any) -> DescribePagesResponse:
        self.asked.release()
        await self._may_answer.wait()
        return self._described


@asynccontextmanager
async def serving(described: DescribePagesResponse, may_answer: asyncio.Event) -> AsyncIterator[tuple[Peer, str]]:
    peer = Peer(described, may_answer)  # type: ignore[abstract]

    server = await serve_blocks(peer, "prefill-0")
    yield peer, f"127.0.0.1:{server.port}"
    await server.grpc_server.stop(None)


def at_once() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def asking(address: str, worker_id: str = "prefill-0") -> pb.ProbePeerRequest:
    return pb.ProbePeerRequest(address=address, worker_id=worker_id)


async def test_reach_of_a_worker_with_the_same_blocks_succeeds_and_is_timed() -> None:
    async with serving(PEER, at_once()) as (_, address):
        tried = await PeerProbe(CONNECT, bound_s=60).reach(asking(address), OURS)
    assert tried.reached
    assert 0 < tried.round_trip_s < 60


@pytest.mark.parametrize("there", ["another worker", "other blocks", "nothing"])
async def test_reach_of_anything_else_fails_alike_and_takes_the_whole_time_limit(there: str) -> None:
    loop = asyncio.get_running_loop()
    async with serving(STRANGER if there == "other blocks" else PEER, at_once()) as (_, address):
        if there == "nothing":
            address = f"127.0.0.1:{free_port('127.0.0.1')}"
        request = asking(address, "prefill-1" if there == "another worker" else "prefill-0")
        started_s = loop.time()
        tried = await PeerProbe(CONNECT, bound_s=BOUND_S).reach(request, OURS)
    assert tried == pb.ProbePeerResponse(reached=False)
    assert loop.time() - started_s >= 0.9 * BOUND_S


@pytest.mark.parametrize("address", ["", "here", "unix:/run/a.sock", "http://a:80", "a:1/b", "[::1]", "a b:80"])
async def test_reach_of_a_malformed_address_is_refused_by_field(address: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await PeerProbe(CONNECT).reach(asking(address), OURS)
    assert caught.value.field == "address"


async def test_reach_beyond_the_limit_is_refused_until_one_ends() -> None:
    may_answer = asyncio.Event()
    probe = PeerProbe(CONNECT, bound_s=60)
    async with serving(PEER, may_answer) as (peer, address):
        running = [asyncio.create_task(probe.reach(asking(address), OURS)) for _ in range(MAX_PROBES)]
        for _ in running:
            await peer.asked.acquire()
        with pytest.raises(Overloaded):
            await probe.reach(asking(address), OURS)
        may_answer.set()
        assert all(tried.reached for tried in await asyncio.gather(*running))
        assert (await probe.reach(asking(address), OURS)).reached
