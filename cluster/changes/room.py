"""Room for more workers on the one host of a cluster: cores for their threads, and memory."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from cluster.processes.managed_process import ManagedProcess
from common.cgroups import usable_cores
from common.config import PoolConfig
from engine.device.memory import measure_host

_WORKERS_PER_CORE = 4
"""More workers than that on each core only wait for each other."""
_USABLE_SHARE = 0.9
"""Share of the free memory that new workers may take."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """The resources of a host, and what its workers take."""

    num_workers: int
    """Workers of both pools that are there already."""
    cores: int
    free_bytes: int
    worker_bytes: int
    """Memory that another worker takes at least."""

    @property
    def num_fitting(self) -> int:
        """Most workers that the host can run, at least those that are there."""
        by_memory = self.num_workers + int(_USABLE_SHARE * self.free_bytes) // max(1, self.worker_bytes)
        return max(self.num_workers, min(_WORKERS_PER_CORE * self.cores, by_memory))

    def __str__(self) -> str:
        return (
            f"{self.cores} cores and {self.free_bytes / _GIB:.1f} GiB of free memory, of which a worker takes"
            f" {self.worker_bytes / _GIB:.1f}"
        )


def measure_room(workers: Iterable[ManagedProcess], pools: Iterable[PoolConfig]) -> HostRoom | None:
    """Return the room on the host of these workers; None where they may run on several hosts.

    A new worker takes what the smallest of the others has, and the pages for which its pool names an amount.
    """
    present = list(workers)
    if not present or any(each.spec.host is None for each in present):
        return None
    return HostRoom(
        num_workers=len(present),
        cores=usable_cores(),
        free_bytes=measure_host().available_bytes,
        worker_bytes=min(map(_resident_bytes, present)) + max(map(_page_bytes, pools)),
    )


def _resident_bytes(worker: ManagedProcess) -> int:
    """Return the memory of a worker now; 0 while it starts."""
    identity = worker.state().identity
    with suppress(psutil.Error):
        if identity is not None:
            return int(psutil.Process(identity.pid).memory_info().rss)
    return 0


def _page_bytes(pool: PoolConfig) -> int:
    return 0 if pool.kv_memory_gib == "auto" or pool.num_blocks is not None else int(pool.kv_memory_gib * _GIB)
