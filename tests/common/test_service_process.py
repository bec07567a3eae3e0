"""Routers and workers as plain processes end alike."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.process import parse_ready
from common.rpc import client_channel
from common.trust.identity import Role
from tests.trust import as_router, enrol_child

TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    ("role", "command", "connect", "number"),
    [  # in common/signals.py the two signals are one
        (Role.ROUTER, ("router", "--port", "0"), client_channel, signal.SIGTERM),
        (Role.WORKER, ("cluster.worker_process", "--role", "prefill"), as_router, signal.SIGINT),
    ],
)
async def test_second_signal_ends_a_process_that_drains_at_once(
    role: Role,
    command: tuple[str, ...],
    connect: Callable[[str], grpc.aio.Channel],
    number: signal.Signals,
    tmp_path: Path,
) -> None:
    config = tmp_path / "serving.yaml"
    config.write_text("model: {engine: fake}\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command, "--config", str(config), "--die-with-parent"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await enrol_child(process, role, "some-0")
            ready = parse_ready((await process.stdout.readline()).decode())
            assert ready is not None
            async with connect(ready.address) as channel:
                # The open call holds up the drain, and says when it has begun.
                health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
                process.send_signal(number)
                assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                process.send_signal(number)
                assert await process.wait() == -number
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
