"""vLLM's own prefill/decode disaggregation: two of its servers, its NixlConnector between them, its router before."""

import time
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.group import ArmSpec, end_group, log_tail, start_group
from benchmarks.peers.process import ArmFailed
from benchmarks.peers.vllm_server import Report, VllmServerSpec, open_here, vllm_server
from common.ports import free_port

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_POLL_S = 0.25
_STOP_GRACE_S = 5.0


@contextmanager
def vllm_pd(spec: VllmServerSpec, router_venv: Path, *, folder: Path, report: Report) -> Iterator[str]:
    """Serve by a prefill and a decode server, each with `spec`, and vllm-router; yields the URL of the API.

    Even idle, the two take a core: they have to be down while others are measured. Logs go to `folder`. At the end
    nothing of it is left. Raises ArmFailed.
    """
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                vllm_server(
                    replace(spec, nixl_port=free_port(_HOST)), log_path=folder / f"vllm-{role}.log", report=report
                )
            )
            for role in ("prefill", "decode")
        ]
        prefill, decode = (server.url.removesuffix("/v1") for server in servers)
        port, log_path = free_port(_HOST), folder / "vllm-router.log"
        command = [str(router_venv / "bin" / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        command += ["--prefill", prefill, "--decode", decode, "--host", _HOST, "--port", str(port)]
        command += ["--prometheus-port", str(free_port(_HOST))]
        process = start_group(ArmSpec(name="vllm-router", command=command), log_path=log_path)
        stack.callback(end_group, process, grace_s=_STOP_GRACE_S)
        url = f"http://{_HOST}:{port}/v1"
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not _answers(f"{url}/models"):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise ArmFailed(
                    f"vllm-router did not start; its log is {log_path}, which ends with\n{log_tail(log_path)}"
                )
            time.sleep(_POLL_S)
        yield url


def _answers(url: str) -> bool:
    try:
        open_here(url, timeout=2.0).close()
    except (OSError, urllib.error.HTTPError):
        return False
    return True
