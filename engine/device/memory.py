"""A worker's share of the free memory for KV pages (`kv_memory_gib: auto`).

On a host: half of this worker's part, less the worker's own use. It is measured after loading, so that the memory of
weights, packed copies and kernels is included and not guessed. Only a draft model is loaded later, and counted by its
files and its pages.

Workers of one host must not count the same free memory twice, and a restarted worker must get as many pages as before,
though the others have filled theirs by then. So the launcher measures the host once, before any worker runs, and
divides it like the cores (`cluster.processes.plan`); each worker subtracts its own use from its part. The system grants
memory when it is first written, so that a sum that is too large shows hours later, as a kill: the memory that is free
now is always an upper bound.

On a device the part is a fraction of the card (`device_free_bytes`); `engine.cuda` measures the needs of steps and
graphs.
"""

from dataclasses import dataclass

import psutil

from common.cgroups import memory_headroom_bytes
from common.process import CannotStart

_GIB = 1 << 30

HOST_KV_SHARE = 0.5
"""Share of a worker's part of a host. The rest is for page cache, router, clients, and growth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """Part of the memory that belongs to this process among all workers."""

    host_bytes: int | None = None
    """Part as the launcher divided it; None: `host_fraction` of the memory that is there now."""
    host_fraction: float = 1.0
    device_fraction: float = 1.0
    reserved_bytes: int = 0
    """Host memory that this process takes once its pages are there: for a draft model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """A measurement of a host's memory."""

    available_bytes: int
    """Memory that the system and all control groups around this process still grant without swapping."""
    process_bytes: int
    """Resident memory of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A measurement of a device's memory."""

    total_bytes: int
    free_bytes: int
    process_bytes: int
    """Memory held by this process's allocator and context."""


class NoRoomForPages(CannotStart):
    """The KV pages that are asked for do not fit, or there is room for none."""

    key = "pools.*.kv_memory_gib"


def host_kv_bytes(memory: HostMemory, share: MemoryShare) -> int:
    """Return the bytes for KV pages in host memory. Raises NoRoomForPages when nothing is left."""
    part = share.host_bytes
    if part is None:
        part = int((memory.available_bytes + memory.process_bytes) * share.host_fraction)
    left = min(part - memory.process_bytes, memory.available_bytes) - share.reserved_bytes
    if left <= 0:
        raise NoRoomForPages(
            f"auto finds no memory for KV pages: this worker's part of the host is {_gib(part)}, it uses"
            f" {_gib(memory.process_bytes)} already, drafting takes {_gib(share.reserved_bytes)}, and"
            f" {_gib(memory.available_bytes)} are free"
        )
    return int(left * HOST_KV_SHARE)


def device_free_bytes(memory: DeviceMemory, share: MemoryShare) -> int:
    """Return this process's part of a device's free memory; negative when it has outgrown its part."""
    return min(memory.free_bytes, int(memory.total_bytes * share.device_fraction) - memory.process_bytes)


def measure_host() -> HostMemory:
    """Return the host's memory now, within a container's limit."""
    available = psutil.virtual_memory().available
    headroom = memory_headroom_bytes()
    return HostMemory(
        available_bytes=available if headroom is None else min(available, headroom),
        process_bytes=psutil.Process().memory_info().rss,
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
