"""The routers that are compared on requests: each a process with mock workers behind it."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.peers.group import REPOSITORY
from benchmarks.peers.venv import PeerPackages, VenvFailed, ensure_venv
from benchmarks.router.clients import Load, Measured, run_grpc, run_http
from benchmarks.token_router import client_of
from benchmarks.trust import HOST, PLAIN, first_line
from common.process import parse_ready
from common.rpc import Connect, client_channel
from common.trust.authority import Authority, AuthoritySettings
from common.trust.channels import Reach
from common.trust.credentials import Credentials
from common.trust.identity import Role
from kvrelay.v1 import router_admin_pb2, router_admin_pb2_grpc, worker_pb2

SGLANG_ROUTER = PeerPackages(name="sglang-router-0.3.2", steps=(("install", "sglang-router==0.3.2"),))
VLLM_ROUTER = PeerPackages(name="vllm-router-0.1.17", steps=(("install", "vllm-router==0.1.17"),))
NUM_WORKERS = 4
START_TIMEOUT_S = 60.0


class ArmMissing(Exception):
    """A router cannot be measured; the message says why."""


@dataclass(slots=True, kw_only=True)
class RequestArm:
    """A running router and its mocks."""

    name: str
    address: str
    is_grpc: bool
    router: subprocess.Popen[bytes]
    mock: subprocess.Popen[bytes]
    connect: Connect
    """Makes a client's channel to a gRPC door."""

    def run(self, load: Load) -> Measured:
        """Run one round."""
        if self.is_grpc:
            return asyncio.run(run_grpc(self.connect, self.address, load))
        return asyncio.run(run_http(int(self.address.rpartition(":")[2]), load))

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU time of router and mocks so far."""
        return _cpu_s(self.router.pid), _cpu_s(self.mock.pid)


def _cpu_s(pid: int) -> float:
    process = psutil.Process(pid)
    total_s = 0.0
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total_s += times.user + times.system
    return total_s


@contextmanager
def _process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(list(command), cwd=REPOSITORY, stdin=subprocess.PIPE, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _mocks(module: str, *arguments: int) -> "AbstractContextManager[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", f"benchmarks.router.{module}", *map(str, arguments)]
    return _process(command, stdout=subprocess.PIPE)


@contextmanager
def kvrelay_arm(settings: AuthoritySettings = PLAIN) -> Iterator[RequestArm]:
    """Run our router with two prefill and two decode workers, of a cluster with these settings."""
    authority = Authority.new(settings)
    with tempfile.TemporaryDirectory() as folder, _mocks("mock_grpc", NUM_WORKERS) as mock:
        ports = first_line(mock, authority, role=Role.WORKER, name="mocks").split()
        config = Path(folder) / "serving.yaml"
        section = {"port": 0, "metrics_port": None, "max_message_mib": 16}
        config.write_text(yaml.safe_dump({"model": {"engine": "fake"}, "router": section}), encoding="utf-8")
        log = (Path(folder) / "router.log").open("wb")
        command = [sys.executable, "-m", "router", "--config", str(config)]
        with log, _process(command, stdout=subprocess.PIPE, stderr=log) as router:
            ready = parse_ready(first_line(router, authority, role=Role.ROUTER, name="router-0"))
            if ready is None:
                raise ArmMissing(f"the router did not start: {Path(log.name).read_text(encoding='utf-8')[-500:]}")
            asyncio.run(_join(ready.admin_address, ports, authority))
            yield RequestArm(
                name="kvrelay",
                address=ready.address,
                is_grpc=True,
                router=router,
                mock=mock,
                connect=client_of(authority),
            )


async def _join(address: str, ports: Sequence[str], authority: Authority) -> None:
    reach = Reach.of(Credentials.of(authority, Role.CONTROLLER, "controller"))
    roles = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
    workers = [
        router_admin_pb2.WorkerEndpoint(worker_id=f"w{number}", role=roles[number % 2], address=f"{HOST}:{port}")
        for number, port in enumerate(ports)
    ]
    async with reach.router(address) as channel, asyncio.timeout(START_TIMEOUT_S):
        admin = router_admin_pb2_grpc.RouterAdminServiceStub(channel)
        request = router_admin_pb2.SetWorkersRequest(workers=workers)
        while (await admin.SetWorkers(request)).num_ready < len(workers):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.05)


@contextmanager
def sglang_arm(num_chunks: int) -> Iterator[RequestArm]:
    """Run sglang-router with TCP_NODELAY forced on. Raises ArmMissing."""
    venv = _venv(SGLANG_ROUTER)
    with tempfile.TemporaryDirectory() as folder:
        environment = {"LD_PRELOAD": str(_compile_shim(Path(folder)))}
        command = [str(venv / "bin" / "python"), "-m", "sglang_router.launch_router"]
        with _http_arm("sglang-router, NODELAY", command, num_chunks, environment) as arm:
            yield arm


@contextmanager
def vllm_arm(num_chunks: int) -> Iterator[RequestArm]:
    """Run vllm-router. Raises ArmMissing."""
    command = [str(_venv(VLLM_ROUTER) / "bin" / "vllm-router")]
    with _http_arm("vllm-router", command, num_chunks, {}) as arm:
        yield arm


def _venv(packages: PeerPackages) -> Path:
    try:
        return ensure_venv(packages, print)
    except VenvFailed as error:
        raise ArmMissing(str(error)) from error


def _compile_shim(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ArmMissing("no C compiler for the TCP_NODELAY shim, and without it the router waits 40 ms a request")
    library = folder / "nodelay.so"
    source = Path(__file__).with_name("nodelay.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@contextmanager
def _http_arm(name: str, command: Sequence[str], num_chunks: int, environment: dict[str, str]) -> Iterator[RequestArm]:
    with tempfile.TemporaryDirectory() as folder, _mocks("mock_http", NUM_WORKERS, num_chunks) as mock:
        assert mock.stdout is not None
        ports = mock.stdout.readline().decode().split()
        port, metrics_port = _free_port(), _free_port()
        urls = [f"http://{HOST}:{worker_port}" for worker_port in ports]
        options = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--worker-urls", *urls]
        options += ["--prometheus-port", str(metrics_port), "--log-level", "error"]
        log_path = Path(folder) / "router.log"
        env = {**os.environ, **environment}
        with log_path.open("wb") as log, _process([*command, *options], stdout=log, stderr=log, env=env) as router:
            _wait_for_answer(port, router, log_path)
            yield RequestArm(
                name=name, address=f"127.0.0.1:{port}", is_grpc=False, router=router, mock=mock, connect=client_channel
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for_answer(port: int, router: "subprocess.Popen[bytes]", log_path: Path) -> None:
    body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "are you there?"}]}).encode()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    probe = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and router.poll() is None:
        with suppress(OSError, urllib.error.HTTPError):  # healthy it is before it knows its workers: an answer counts
            urllib.request.urlopen(probe, timeout=1.0).close()
            return
        time.sleep(0.1)
    raise ArmMissing(f"did not answer; its log ends with: {log_path.read_text(errors='replace')[-400:]}")
