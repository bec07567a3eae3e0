"""Calls that wait for a server (common/rpc_server.py)."""

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc_server import start_server
from common.trust.identity import Role
from common.trust.proofs import METADATA_KEY, audience_of
from tests.trust import credentials_of, worker_guard


@pytest.mark.parametrize(("num_calls", "busy_s"), [(4, 31.0), (2000, 4.0)])
async def test_calls_to_a_busy_event_loop_are_answered_not_dropped(num_calls: int, busy_s: float) -> None:
    """By itself, gRPC drops calls that no one has taken for 30 s, and some of more than 1,000."""
    server = await start_server(lambda _server: [], host="127.0.0.1", port=0, guard=worker_guard())
    address = f"127.0.0.1:{server.port}"
    signer = credentials_of(Role.ROUTER, "router-0").held.signer
    proof = signer.sign({}, audience=audience_of(Role.WORKER, address), lifetime_s=300)
    with grpc.insecure_channel(address) as channel:  # its own threads call while the event loop stands still
        check = health_pb2_grpc.HealthStub(channel).Check
        calls = [
            check.future(health_pb2.HealthCheckRequest(), metadata=[(METADATA_KEY, proof)]) for _ in range(num_calls)
        ]
        time.sleep(busy_s)  # noqa: ASYNC251 - what the test is about
        replies = await asyncio.to_thread(lambda: [call.result() for call in calls])
    assert {reply.status for reply in replies} == {health_pb2.HealthCheckResponse.SERVING}
    await server.stop(0)
