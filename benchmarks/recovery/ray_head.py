"""A Ray of two nodes on this machine whose head is kept, as cluster.yaml keeps it, so that it can be killed.

`cluster.ray.keep_head` starts the head and starts it again; its state is on disk. The other node has all processors,
and is at 127.0.0.2: workers and every router but the first run there, the controller and the first router at the head.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_gcs_storage": "rocksdb",
}
"""Environment of the head as in cluster.yaml, without the token."""
_LEAN = ("--object-store-memory=80000000", "--disable-usage-stats")
_MAIN_PROCESSES = ("gcs_server", "raylet")


class KeptHead:
    """The head of a Ray, with its keeper, and another node."""

    def __init__(self, folder: Path, *, num_cpus: int) -> None:
        """Start both; returns once the head answers. `num_cpus`: of the other node. Raises CalledProcessError."""
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._environment = os.environ | _ENVIRONMENT | {"RAY_gcs_storage_path": str(folder / "gcs")}
        self._environment.pop("RAY_ADDRESS", None)
        self._ray = str(Path(sys.executable).with_name("ray"))
        head = (
            "start",
            "--head",
            f"--port={port}",
            "--num-cpus=0",
            f"--temp-dir={folder}",
            *_LEAN,
        )
        self._log = folder / "head.log"
        keep = "import sys; from pathlib import Path; from cluster.ray.keep_head import keep; print(flush=True);"
        keep += "sys.exit(keep(sys.argv[2:], Path(sys.argv[1]), on_up=lambda: print('up', flush=True)))"
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", keep, str(self._log), self._ray, *head, "--include-dashboard=false"],
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt would end it before its head
        )
        assert self._keeper.stdout is not None
        if not any(line == "up\n" for line in self._keeper.stdout):
            raise RuntimeError(f"cannot start Ray's head: {self._log.read_text(encoding='utf-8')[-2000:]}")
        (main, *_) = self._main_processes()
        (ip,) = (word.partition("=")[2] for word in main.cmdline() if word.startswith("--node-ip-address="))
        self.address = f"{ip}:{port}"
        node = ("start", f"--address={self.address}", "--node-ip-address=127.0.0.2", f"--num-cpus={num_cpus}", *_LEAN)
        # --block: the node is a child of ours. `ray start` says so once it runs.
        self._node = subprocess.Popen(
            [self._ray, *node, "--block"],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._node.stdout is not None
        if not any("--block" in line for line in self._node.stdout):
            raise RuntimeError("cannot start the second node of Ray: it has ended")

    def kill(self) -> None:
        """Kill the head's main processes with SIGKILL. Its actors end with them."""
        # `ray start --head` refuses to start where this names an address that a process of this machine has, as the
        # other node does, which would be on another machine.
        (self._folder / "ray_current_cluster").unlink(missing_ok=True)
        for process in self._main_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def stop(self) -> None:
        """End everything, the keeper first."""
        found: list[psutil.Process] = []
        for pid in (self._keeper.pid, self._node.pid):
            with suppress(psutil.NoSuchProcess):
                found += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._keeper.wait()
        self._node.wait()
        for ended in (self._keeper, self._node):
            if ended.stdout is not None:
                ended.stdout.close()

    def _main_processes(self) -> list[psutil.Process]:
        below = psutil.Process(self._keeper.pid).children(recursive=True)
        return sorted((each for each in below if each.name() in _MAIN_PROCESSES), key=lambda each: each.name())


@contextmanager
def kept_ray(*, num_cpus: int) -> Iterator[KeptHead]:
    """Run such a Ray for the block, which clusters with `launcher: ray` join. Needs Ray."""
    folder = Path(tempfile.mkdtemp(prefix="kvr", dir="/tmp"))
    os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"})
    try:
        head = KeptHead(folder, num_cpus=num_cpus)
        try:
            os.environ["RAY_ADDRESS"] = head.address
            yield head
        finally:
            os.environ.pop("RAY_ADDRESS", None)
            head.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
