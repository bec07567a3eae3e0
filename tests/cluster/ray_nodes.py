"""A Ray cluster of several nodes on this machine, for tests, in one process that ends with its stdin.

    python -m tests.cluster.ray_nodes TEMP_DIR NODES

`NODES` is a JSON list, head first, of arguments of `Cluster.add_node`. Prints the address once all nodes are there.
The head has this machine's address, where drivers find it; the others have 127.0.0.2, 127.0.0.3, …
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
}


@contextmanager
def ray_nodes(nodes: Sequence[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Run a Ray cluster inside the block; yields what its drivers need in their environment."""
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
        address = next((line.split()[1] for line in process.stdout if line.startswith("ADDRESS ")), "")
        assert address, f"Ray did not start: exit status {process.wait()}"
        yield {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    finally:
        process.stdin.close()
        process.wait(timeout=120)
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the nodes until stdin ends."""
    from ray.cluster_utils import Cluster

    folder, nodes = sys.argv[1], json.loads(sys.argv[2])
    cluster = Cluster()
    try:
        for number, node in enumerate(nodes):
            where = {"node_ip_address": f"127.0.0.{number + 1}"} if number else {}
            shared = {"object_store_memory": 80_000_000, "include_dashboard": False, "include_log_monitor": False}
            first = {"temp_dir": folder, "no_monitor": True} if number == 0 else {}
            cluster.add_node(wait=True, **where, **shared, **first, **node)
        print("ADDRESS", cluster.address, flush=True)  # noqa: T201 - for the parent process
        sys.stdin.read()
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
