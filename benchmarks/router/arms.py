"""The routers that are compared on requests: each a process with mock workers behind it."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.loopback import open_here
from benchmarks.peers.group import ArmSpec, cpu_s, end_group, log_tail, start_group
from benchmarks.peers.venv import PeerPackages, VenvFailed, ensure_venv
from benchmarks.router.clients import Load, Measured, run_grpc, run_http
from benchmarks.token_router import client_of, running_router
from benchmarks.trust import HOST, PLAIN, running_child
from common.ports import free_port
from common.trust.authority import Authority
from common.trust.identity import Role
from kvrelay.v1 import router_admin_pb2, worker_pb2

SGLANG_ROUTER = PeerPackages(name="sglang-router-0.3.2", steps=(("install", "sglang-router==0.3.2"),))
VLLM_ROUTER = PeerPackages(name="vllm-router-0.1.17", steps=(("install", "vllm-router==0.1.17"),))
NUM_WORKERS = 4
START_TIMEOUT_S = 60.0
_GRACE_S = 10.0


class ArmMissing(Exception):
    """A router cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArm:
    """A running router and its mocks."""

    name: str
    run: Callable[[Load], Awaitable[Measured]]
    """Runs one round."""
    router_pid: int
    mock_pid: int

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU time of router and mocks so far."""
        return cpu_s(self.router_pid), cpu_s(self.mock_pid)


@asynccontextmanager
async def kvrelay_arm() -> AsyncIterator[RequestArm]:
    """Run our router with two prefill and two decode workers."""
    authority = Authority.new(PLAIN)
    roles = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
    command = ("benchmarks.router.mock_grpc", str(NUM_WORKERS))
    async with running_child(authority, *command, role=Role.WORKER, name="mocks") as mocks:
        workers = [
            router_admin_pb2.WorkerEndpoint(worker_id=f"w{number}", role=roles[number % 2], address=f"{HOST}:{port}")
            for number, port in enumerate(mocks.line.split())
        ]
        async with running_router(authority, workers, {"max_message_mib": 16}) as router:
            run = partial(run_grpc, client_of(authority), router.ready.address)
            yield RequestArm(name="kvrelay", run=run, router_pid=router.pid, mock_pid=mocks.pid)


@asynccontextmanager
async def sglang_arm(num_chunks: int) -> AsyncIterator[RequestArm]:
    """Run sglang-router with TCP_NODELAY forced on. Raises ArmMissing."""
    venv = _venv(SGLANG_ROUTER)
    with tempfile.TemporaryDirectory() as folder:
        environment = {"LD_PRELOAD": str(_compile_shim(Path(folder)))}
        command = [str(venv / "bin" / "python"), "-m", "sglang_router.launch_router"]
        async with _http_arm("sglang-router, NODELAY", command, num_chunks, environment) as arm:
            yield arm


@asynccontextmanager
async def vllm_arm(num_chunks: int) -> AsyncIterator[RequestArm]:
    """Run vllm-router. Raises ArmMissing."""
    command = [str(_venv(VLLM_ROUTER) / "bin" / "vllm-router")]
    async with _http_arm("vllm-router", command, num_chunks, {}) as arm:
        yield arm


def _venv(packages: PeerPackages) -> Path:
    try:
        return ensure_venv(packages, print)
    except VenvFailed as error:
        raise ArmMissing(str(error)) from error


def _compile_shim(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ArmMissing(
            "cannot build the TCP_NODELAY shim: no C compiler; install one, or the router waits 40 ms a request"
        )
    library = folder / "nodelay.so"
    source = Path(__file__).with_name("nodelay.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@asynccontextmanager
async def _http_arm(
    name: str, command: Sequence[str], num_chunks: int, environment: dict[str, str]
) -> AsyncIterator[RequestArm]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mock_command = [sys.executable, "-m", "benchmarks.router.mock_http", str(NUM_WORKERS), str(num_chunks)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        mock = start_group(ArmSpec(name="mocks", command=mock_command), log_path=folder / "mocks.log", **pipes)
        stack.callback(end_group, mock, grace_s=_GRACE_S)
        assert mock.stdout is not None
        urls = [f"http://{HOST}:{worker_port}" for worker_port in mock.stdout.readline().decode().split()]
        port, log_path = free_port(HOST), folder / "router.log"
        options = ["--host", HOST, "--port", str(port), "--policy", "cache_aware", "--worker-urls", *urls]
        options += ["--prometheus-port", str(free_port(HOST)), "--log-level", "error"]
        router = start_group(ArmSpec(name=name, command=[*command, *options], env=environment), log_path=log_path)
        stack.callback(end_group, router, grace_s=_GRACE_S)
        _wait_for_answer(port, router, log_path)
        yield RequestArm(name=name, run=partial(run_http, port), router_pid=router.pid, mock_pid=mock.pid)


def _wait_for_answer(port: int, router: "subprocess.Popen[bytes]", log_path: Path) -> None:
    body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "are you there?"}]}).encode()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    probe = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and router.poll() is None:
        with suppress(OSError, urllib.error.HTTPError):  # it is healthy before it knows its workers: an answer counts
            open_here(probe, timeout=1.0).close()
            return
        time.sleep(0.1)
    raise ArmMissing(f"did not answer; its log ends with\n{log_tail(log_path)}")
