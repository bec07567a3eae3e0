"""The Ray in which actors live; by default a private one on this host that ends with the supervisor.

Only holders of the private Ray's random token can use it.
"""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.job_config import JobConfig

from cluster.processes.plan import ProcessSpec
from common.signals import handlers_kept
from kvrelay.packages import home_of

NAMESPACE = "kvrelay"
_OBJECT_STORE_BYTES = 80_000_000  # Ray's minimum is 75 MiB; our actors put nothing into it
_PRIVATE_CPUS = 1 << 16
"""Enough that Ray never rations CPUs: a worker's share is its thread count, and pools can grow."""


@contextmanager
def driver_of(cluster: str) -> Iterator[JobConfig]:
    """Yield the job of a driver that connects to Ray in the block, named after the cluster.

    Ray's processes look for packages in the driver's working directory first. Within the block this is the folder of
    our own packages: a user's folder `common` must not run in place of ours.
    """
    with chdir(home_of()):
        yield JobConfig(metadata={"job_name": f"kvrelay {cluster}"})


class RayHome:
    """The Ray in which the actors live. The defaults are those of a Ray that keeps nothing for a process."""

    description: str
    """Where it is, for messages."""
    working_dir: Path | None = None
    """Working directory of the actors; None: the one of Ray."""

    def open(self) -> None:
        """Connect to Ray or start it; blocks. Raises RayError, RuntimeError, OSError or ValueError."""

    def found(self) -> frozenset[str]:
        """Return the names of this cluster's running processes."""
        return frozenset()

    def options(self, spec: ProcessSpec) -> dict[str, Any]:
        """Return additional options of the actor of a process."""
        return {}

    def hosts_of(self, spec: ProcessSpec) -> str:
        """Return which hosts may run a process, for messages about one that found none."""
        return "host"

    def served(self, name: str) -> None:
        """Note that a process serves: it needs no more room than it holds."""

    def forget(self, name: str) -> None:
        """Release everything that is kept for a process that is gone."""

    async def close(self) -> None:
        """Disconnect from Ray, or stop a private one. Harmless if `open` failed."""


class PrivateRay(RayHome):
    """A Ray whose actors end with the supervisor. `outside.prepare_to_start` precedes its import."""

    description = "on this machine"

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._session_dir: Path | None = None

    def open(self) -> None:
        """Start Ray: blocks for about 3 s. Main thread only. Raises the exceptions of ray.init."""
        self.working_dir = Path.cwd()
        with handlers_kept(), driver_of(self._cluster) as job:
            context: Any = ray.init(
                address="local",
                namespace=NAMESPACE,
                job_config=job,
                num_cpus=_PRIVATE_CPUS,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        self._session_dir = Path(context.address_info["session_dir"])

    async def close(self) -> None:
        """Stop Ray and delete its session folder."""
        if not ray.is_initialized():
            return
        await asyncio.to_thread(ray.shutdown)
        if self._session_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self._session_dir, ignore_errors=True)
