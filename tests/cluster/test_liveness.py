"""Processes that live but no longer answer are ended; those that answer late are not."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.processes import liveness
from cluster.processes.liveness import forever, service_gone, until_over
from common.rpc import client_channel

SILENT_S = 0.1


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers only some of the checks; gRPC answers pings all the while."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        """One for each check; the last one holds for all later ones."""

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        if not (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]):
            await self.leave_unanswered(context)
        return health_pb2.HealthCheckResponse()

    async def leave_unanswered(self, context: Any) -> None:
        await asyncio.Event().wait()


class Overdue(Health):
    """Ends the checks that it does not answer as if their time were over, so that no answer can be late by chance."""

    async def leave_unanswered(self, context: Any) -> None:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED)


async def gone(health: Health) -> str:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(60):
            return await service_gone(f"127.0.0.1:{port}", client_channel)
    finally:
        await server.stop(None)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_PERIOD_S", 0.001)
    monkeypatch.setattr(liveness, "_ANSWER_S", 0.05)


async def test_service_that_answers_pings_and_no_check_for_long_is_gone() -> None:
    assert "left 2 health checks unanswered" in await gone(Health(True, True, False))


async def test_late_answers_now_and_then_do_not_end_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_ANSWER_S", 60.0)
    health = Overdue(*[False, True] * 3, False)
    assert "unanswered" in await gone(health)
    assert len(health.answers) == 1, "every earlier check was made"


async def test_busy_service_that_answers_pings_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(Health):
        async def leave_unanswered(self, context: Any) -> None:
            monkeypatch.setattr(liveness, "_SILENT_S", SILENT_S)  # by now it is connected
            await super().leave_unanswered(context)

    monkeypatch.setattr(liveness, "_ANSWER_S", 3 * SILENT_S)
    assert "unanswered" in await gone(Busy(True, False))


async def test_stopped_process_whose_kernel_still_accepts_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_SILENT_S", SILENT_S)
    kernel = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(60), "127.0.0.1", 0)
    async with kernel, asyncio.timeout(60):
        port = kernel.sockets[0].getsockname()[1]
        assert "silent" in await service_gone(f"127.0.0.1:{port}", client_channel)


async def test_process_of_another_host_is_gone_when_it_refuses_twice() -> None:
    async with asyncio.timeout(60):
        assert "refused 2 health checks" in await service_gone("127.0.0.1:1", client_channel)


async def test_process_with_a_closed_door_has_as_long_to_end_as_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_SILENT_S", SILENT_S)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    assert "silent" in await service_gone("127.0.0.1:1", client_channel, is_here=True)
    assert loop.time() - begun_s >= SILENT_S


async def test_silent_process_is_killed_and_its_silence_is_the_reason() -> None:
    killed = asyncio.Event()

    async def died() -> str:
        await killed.wait()
        return "killed by SIGKILL"

    async def silent() -> str:
        return "it left 4 health checks unanswered"

    assert await until_over(died(), silent(), killed.set) == "it left 4 health checks unanswered; killed"


async def test_process_that_dies_by_itself_is_not_killed() -> None:
    async def died() -> str:
        return "exited with code 3"

    def kill() -> None:
        raise AssertionError

    assert await until_over(died(), forever(), kill) == "exited with code 3"
