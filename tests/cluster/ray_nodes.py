"""A Ray cluster of several nodes on this machine, for tests, in one process that ends with its stdin.

    python -m tests.cluster.ray_nodes TEMP_DIR NODES

`NODES` is a JSON list, head first, of arguments of `Cluster.add_node`. Prints the address once all nodes are there, and
then, for each line of stdin, what this expression says about Ray. The head has this machine's address, where drivers
find it; the others have 127.0.0.2, 127.0.0.3, …
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_REPO = Path(__file__).parents[2]
_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}


class RayNodes:
    """A Ray cluster that runs."""

    def __init__(self, address: str, process: "subprocess.Popen[str]") -> None:
        self.environment = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
        """Environment variables of its drivers."""
        self._process = process

    def ask(self, expression: str) -> Any:
        """Return what an expression says about Ray. A driver answers that stays: each new one costs seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{expression}\n")
        self._process.stdin.flush()
        told = json.loads(_told(self._process, "TOLD"))
        assert "error" not in told, told["error"]
        return told["value"]


def _told(process: "subprocess.Popen[str]", word: str) -> str:
    """Return the rest of the next line that begins with a word."""
    assert process.stdout is not None
    told = next((line for line in process.stdout if line.startswith(f"{word} ")), None)
    assert told is not None, f"Ray's process ended: exit status {process.wait()}"
    return told.removeprefix(word).strip()


@contextmanager
def ray_nodes(nodes: Sequence[dict[str, Any]]) -> Iterator[RayNodes]:
    """Run a Ray cluster inside the block."""
    folder = tempfile.mkdtemp(prefix="kvr", dir="/tmp")
    environment = os.environ | _SETTINGS
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.ray_nodes", folder, json.dumps(list(nodes))],
        cwd=_REPO,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield RayNodes(_told(process, "ADDRESS"), process)
    finally:
        process.stdin.close()
        process.wait(timeout=120)
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the nodes and answer until stdin ends."""
    import ray
    from ray.cluster_utils import Cluster

    folder, nodes = sys.argv[1], json.loads(sys.argv[2])
    # Cluster leaves its address in Ray's default folder, which a machine that has never run Ray does not have.
    Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray").mkdir(parents=True, exist_ok=True)
    cluster = Cluster()
    try:
        for number, node in enumerate(nodes):
            where = {"node_ip_address": f"127.0.0.{number + 1}"} if number else {}
            shared = {"object_store_memory": 80_000_000, "include_dashboard": False, "include_log_monitor": False}
            first = {"temp_dir": folder, "no_monitor": True} if number == 0 else {}
            cluster.add_node(wait=True, **where, **shared, **first, **node)
        print("ADDRESS", cluster.address, flush=True)  # noqa: T201 - for the parent process
        for line in sys.stdin:
            if not ray.is_initialized():
                ray.init(address=cluster.address, namespace="kvrelay", log_to_driver=False)
            print("TOLD", json.dumps(_answer(line, {"ray": ray})), flush=True)  # noqa: T201
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


def _answer(expression: str, names: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": eval(expression, names)}
    except Exception as error:  # noqa: BLE001 - `ask` raises it
        return {"error": f"{expression}: {error!r}"}


if __name__ == "__main__":
    main()
