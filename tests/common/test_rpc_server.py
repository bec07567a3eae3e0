"""Calls that wait for a server (common/rpc_server.py), and are then taken several at a time (common/acceptors.py)."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import acceptors
from common.rpc_server import start_server
from common.trust.identity import Role
from common.trust.proofs import METADATA_KEY, audience_of
from tests.trust import credentials_of, worker_guard

NUM_CALLS = 40


@asynccontextmanager
async def called(num_calls: int) -> AsyncIterator[list[Any]]:
    """Yield calls to a server of this event loop, which gRPC's own threads make while the loop stands."""
    server = await start_server(lambda _server: [], host="127.0.0.1", port=0, guard=worker_guard())
    address = f"127.0.0.1:{server.port}"
    signer = credentials_of(Role.ROUTER, "router-0").held.signer
    proof = [(METADATA_KEY, signer.sign({}, audience=audience_of(Role.WORKER, address), lifetime_s=300))]
    try:
        with grpc.insecure_channel(address) as channel:
            await asyncio.to_thread(grpc.channel_ready_future(channel).result)
            check = health_pb2_grpc.HealthStub(channel).Check
            yield [check.future(health_pb2.HealthCheckRequest(), metadata=proof) for _ in range(num_calls)]
    finally:
        await server.stop(0)


async def test_calls_to_a_busy_event_loop_are_answered_not_dropped() -> None:
    """By itself, gRPC drops calls that no one has taken for 30 s, and some of more than 1,000."""
    async with called(2000) as calls:
        time.sleep(31.0)  # noqa: ASYNC251 - what the test is about
        replies = await asyncio.to_thread(lambda: [call.result() for call in calls])
    assert {reply.status for reply in replies} == {health_pb2.HealthCheckResponse.SERVING}


async def turns_until_all_are_answered() -> int:
    """Return how many turns a busy event loop makes until calls that came while it stood have their answers."""
    answered = threading.Semaphore(0)
    num_turns = num_answered = 0
    async with called(NUM_CALLS) as calls:
        for call in calls:
            call.add_done_callback(lambda _call: answered.release())
        while num_answered < NUM_CALLS:
            num_turns += 1
            time.sleep(0.003)  # noqa: ASYNC251 - a turn of a busy loop, in which gRPC's threads get on
            await asyncio.sleep(0)
            while answered.acquire(blocking=False):
                num_answered += 1
    return num_turns


async def test_calls_that_come_together_are_not_taken_one_after_another() -> None:
    """gRPC alone needs five turns for each."""
    # On a busy host they may not come together.
    assert min([await turns_until_all_are_answered() for _ in range(3)]) < 2 * NUM_CALLS


async def test_server_answers_with_a_grpc_whose_parts_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptors, "_HANDLE", ["another_parameter"])
    assert await turns_until_all_are_answered() > 2 * NUM_CALLS, "gRPC has become faster: acceptors may go"
