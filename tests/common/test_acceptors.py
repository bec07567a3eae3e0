"""Calls that come together are taken several at a time (common/acceptors.py)."""

import asyncio
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import acceptors
from common.rpc_server import start_server
from common.trust.identity import Role
from common.trust.proofs import METADATA_KEY, audience_of
from tests.trust import credentials_of, worker_guard

NUM_CALLS = 40


async def turns_until_all_are_answered() -> int:
    """Return how many turns a busy event loop makes until calls that came while it stood have their answers."""
    server = await start_server(lambda _server: [], host="127.0.0.1", port=0, guard=worker_guard())
    address = f"127.0.0.1:{server.port}"
    signer = credentials_of(Role.ROUTER, "router-0").held.signer
    proof = signer.sign({}, audience=audience_of(Role.WORKER, address), lifetime_s=300)
    answered = threading.Semaphore(0)
    num_turns = num_answered = 0
    with grpc.insecure_channel(address) as channel:  # its own threads call while the event loop stands
        await asyncio.to_thread(grpc.channel_ready_future(channel).result)
        check = health_pb2_grpc.HealthStub(channel).Check
        for _ in range(NUM_CALLS):
            call = check.future(health_pb2.HealthCheckRequest(), metadata=[(METADATA_KEY, proof)])
            call.add_done_callback(lambda _call: answered.release())
        while num_answered < NUM_CALLS:
            num_turns += 1
            time.sleep(0.003)  # noqa: ASYNC251 - a turn of a busy loop, in which gRPC's threads get on
            await asyncio.sleep(0)
            while answered.acquire(blocking=False):
                num_answered += 1
    await server.stop(0)
    return num_turns


async def test_calls_that_come_together_are_not_taken_one_after_another() -> None:
    """gRPC alone needs five turns for each."""
    assert await turns_until_all_are_answered() < 2 * NUM_CALLS


async def test_server_answers_with_a_grpc_whose_parts_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptors, "_HANDLE", ["another_parameter"])
    assert await turns_until_all_are_answered() > 2 * NUM_CALLS, "gRPC has become faster: acceptors may go"
