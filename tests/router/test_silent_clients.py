"""More silent connections than a router may have open files, at both doors: both go on answering."""

import asyncio
import resource
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from common.process import parse_ready
from common.rpc import client_channel
from common.trust.identity import Role
from kvrelay.v1 import inference_pb2, inference_pb2_grpc
from tests.router.fakes import TIMEOUT_S
from tests.router.http.clients import fetch
from tests.trust import enrol_child

MAX_OPEN_FILES = 256
NUM_SILENT = 300
RECOVERY_S = 60.0
"""The gRPC door answers again when the first silent connections have had their time."""


def limit_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES // 2, MAX_OPEN_FILES))


@asynccontextmanager
async def small_router(folder: Path) -> AsyncIterator[str]:
    """Run a router that may open few files; yields its address."""
    config = folder / "serving.yaml"
    config.write_text("model: {engine: fake}\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--config", str(config), "--port", "0", "--die-with-parent"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=limit_open_files,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(RECOVERY_S):
            await enrol_child(process, Role.ROUTER, "router-0")
            ready = parse_ready((await process.stdout.readline()).decode())
        assert ready is not None
        yield ready.address
    finally:
        process.terminate()
        await process.wait()


async def http_port_of(address: str) -> int:
    async with client_channel(address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).GetClusterStatus(
            inference_pb2.GetClusterStatusRequest(), timeout=RECOVERY_S, wait_for_ready=True
        )
        return int((await call).router.http_port)


async def test_silent_connections_beyond_the_open_files_end_neither_door(tmp_path: Path) -> None:
    async with small_router(tmp_path) as address:
        host, _, port = address.rpartition(":")
        http_port = await http_port_of(address)
        with ExitStack() as silent:
            for at in (http_port, int(port)):
                for _ in range(NUM_SILENT):
                    silent.enter_context(await asyncio.to_thread(socket.create_connection, (host, at), TIMEOUT_S))
            async with asyncio.timeout(TIMEOUT_S):
                assert (await fetch(http_port, "GET", "/version"))[0] == 200
            assert await http_port_of(address) == http_port
            async with asyncio.timeout(TIMEOUT_S):
                assert (await fetch(http_port, "GET", "/version"))[0] == 200
