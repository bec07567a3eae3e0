"""A cluster as a context manager, for benchmarks and experiments."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import lifecycle
from cluster.lifecycle import ClusterInfo
from cluster.processes.starter import Report
from common.config import ServingConfig
from common.signals import uninterrupted


@contextmanager
def running_cluster(
    config: ServingConfig, *, config_path: Path, run_dir: Path, report: Report
) -> Iterator[ClusterInfo]:
    """Run a cluster inside the block, and leave no process behind however it ends. Main thread only.

    See `lifecycle.up` for the arguments. State and logs stay in `run_dir`. Raises ClusterError.
    """
    info = lifecycle.up(config, config_path=config_path, run_dir=run_dir, report=report)
    try:
        yield info
    finally:
        with uninterrupted():
            lifecycle.down(run_dir, report=report)
