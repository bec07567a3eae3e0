"""More silent connections than a router may have open files, at both doors: both keep answering."""

import asyncio
import resource
import socket
from contextlib import ExitStack
from pathlib import Path

from common.rpc import client_channel
from kvrelay.v1 import inference_pb2, inference_pb2_grpc
from tests.router.fakes import TIMEOUT_S
from tests.router.http.clients import fetch
from tests.router.test_server import router_process

MAX_OPEN_FILES = 256
NUM_SILENT = 300
RECOVERY_S = 60.0
"""The gRPC door answers again when the first silent connections have had their time."""


def limit_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES // 2, MAX_OPEN_FILES))


async def http_port_of(address: str) -> int:
    async with client_channel(address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).GetClusterStatus(
            inference_pb2.GetClusterStatusRequest(), timeout=RECOVERY_S, wait_for_ready=True
        )
        return int((await call).router.http_port)


async def test_silent_connections_beyond_the_open_files_end_neither_door(tmp_path: Path) -> None:
    async with router_process(tmp_path, preexec_fn=limit_open_files) as (_process, ready):
        address = ready.address
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
