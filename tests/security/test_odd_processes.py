"""Output of a process can stop that process alone; its supervisor and the others go on."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.x509 import CertificateSigningRequestBuilder, Name

from cluster.processes.launch_local import LocalLauncher
from cluster.processes.launcher import StartFailed
from common.config import parse_config
from common.process import RunningService
from common.service_actor import ServiceActor, ServiceParams
from common.trust.credentials import Credentials
from tests.cluster.support import make_spec
from tests.trust import AUTHORITY

_READY = {"event": "ready", "address": "a:1", "admin_address": "a:1", "metrics_port": 0, "pid": 1}
_TALK = "import sys; sys.stdout.write(open(sys.argv[1]).read()); sys.stdout.flush(); sys.stdin.read()"


def launcher(folder: Path, *lines: str) -> LocalLauncher:
    """Return what starts a process that prints these lines, and then that it is ready."""
    script = folder / "lines"
    script.write_text("\n".join((*lines, json.dumps(_READY), "")))
    return LocalLauncher(
        command=lambda _spec: [sys.executable, "-c", _TALK, str(script)], run_dir=folder, authority=AUTHORITY
    )


def enrol(**request: Any) -> str:
    return json.dumps({"event": "enrol", "request": json.dumps(request)})


@pytest.mark.parametrize("line", ["x" * 300_000, "[" * 60_000], ids=["longer than the buffer", "deep JSON"])
async def test_line_that_nobody_can_read_is_passed_over(tmp_path: Path, line: str) -> None:
    process = await launcher(tmp_path, line).start(make_spec("decode-0"))
    assert process.ready.address == "a:1"
    await process.stop(0)


def of_another_kind() -> str:
    signed = CertificateSigningRequestBuilder().subject_name(Name([])).sign(ed25519.Ed25519PrivateKey.generate(), None)
    return signed.public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize(
    "line",
    [
        enrol(csr_pem=5, hosts=[]),
        enrol(csr_pem="", hosts=[]),
        enrol(csr_pem=Credentials().request(()).csr_pem, hosts=[1]),
        enrol(csr_pem=Credentials().request(()).csr_pem, hosts="abc"),
        enrol(csr_pem=Credentials().request(()).csr_pem, hosts=["\0"]),
        enrol(csr_pem=of_another_kind(), hosts=[]),
        json.dumps({"event": "enrol", "request": "[" * 30_000}),
    ],
)
async def test_request_that_cannot_be_granted_fails_the_start_of_its_process_at_once(tmp_path: Path, line: str) -> None:
    with pytest.raises(StartFailed, match="decode-0"):
        await launcher(tmp_path, line).start(make_spec("decode-0"))


class _Actor(ServiceActor):
    def node_address(self) -> str:
        return "10.0.0.1"

    async def start_service(self, params: ServiceParams, credentials: Credentials, host: str) -> RunningService:
        raise AssertionError


@pytest.mark.parametrize(("role", "hosts"), [("router", ("10.0.0.1", "lb.example")), ("prefill", ()), ("decode", ())])
async def test_only_a_router_asks_for_the_names_by_which_clients_know_doors(role: str, hosts: tuple[str, ...]) -> None:
    config = parse_config({"tls": {"names": ["lb.example"]}}, source="serving.yaml")
    params = ServiceParams(name="x", config=config, host=None, port=0, env={}, role=role, log_path=None)
    actor = _Actor(params)
    assert (await actor.request_certificate()).hosts == hosts
    await actor.stop(0)
