"""The Ray in which actors live; by default a private one on this host that ends with the supervisor.

Only holders of the private Ray's random token can use it. Ray lets every user of the host write in the folders of its
session, so these lie below one that only this user may enter.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.job_config import JobConfig

from cluster.processes.plan import ProcessSpec
from common.own_files import is_own
from common.signals import handlers_kept
from kvrelay.packages import home_of

NAMESPACE = "kvrelay"
_OBJECT_STORE_BYTES = 80_000_000  # Ray's minimum is 75 MiB; our actors put nothing into it
_PRIVATE_CPUS = 1 << 16
"""Enough that Ray never rations CPUs: a worker's share is its thread count, and pools can grow."""
_MAX_FOLDER_BYTES = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Longest path of the private folder, so that those of the session's sockets fit into an address."""


@contextmanager
def driver_of(cluster: str) -> Iterator[JobConfig]:
    """Yield the job of a driver that connects to Ray in the block, named after the cluster.

    Ray's processes look for packages in the driver's working directory first. Within the block this is the folder of
    our own packages: a user's folder `common` must not run in place of ours.
    """
    with chdir(home_of()):
        yield JobConfig(metadata={"job_name": f"kvrelay {cluster}"})


def bundle_of(spec: ProcessSpec) -> dict[str, float]:
    """Return the resources that a process reserves on its host."""
    return {kind: amount for kind, amount in (("CPU", spec.num_cpus), ("GPU", spec.num_gpus)) if amount}


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

    def free_on(self, spec: ProcessSpec) -> list[Mapping[str, float]]:
        """Return the free resources of each host that may run a process; empty where Ray never rations them."""
        return []

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
        self._folder: Path | None = None

    def open(self) -> None:
        """Start Ray: blocks for about 3 s. Main thread only. Raises the exceptions of ray.init, and OSError."""
        self.working_dir = Path.cwd()
        self._folder = _private_folder(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()))
        with handlers_kept(), driver_of(self._cluster) as job:
            ray.init(
                address="local",
                namespace=NAMESPACE,
                job_config=job,
                num_cpus=_PRIVATE_CPUS,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(self._folder / "ray"),  # which Ray gives mode 0777, like all below
            )

    async def close(self) -> None:
        """Stop Ray and delete its folder."""
        if ray.is_initialized():
            await asyncio.to_thread(ray.shutdown)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def _private_folder(parent: Path) -> Path:
    """Return a new folder that only this user may enter. Raises OSError where others could take its place."""
    if not is_own(parent):
        raise PermissionError(
            f"cannot keep sockets below {parent}: other users may rename what is there; set RAY_TMPDIR to a folder of"
            " your own, or give it the sticky bit"
        )
    folder = Path(tempfile.mkdtemp(prefix="kvr-", dir=parent))
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        folder.rmdir()
        raise OSError(
            f"cannot keep sockets below {parent}: their paths are too long; set RAY_TMPDIR to a shorter folder"
        )
    return folder
