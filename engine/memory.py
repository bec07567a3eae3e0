"""How much of the memory that is measured to be free a worker may fill with KV pages (`kv_memory_gib: auto`).

On a host: half of this worker's part, less what the worker itself uses. Measure behind loading: what weights, packed
copies and kernels take is then in the figures, not guessed.

Workers of one host must not count the same free memory twice, and a restarted worker must find as many pages as its
predecessor had, though the others have filled theirs meanwhile. So whoever starts the workers measures the host once,
before any of them runs, and deals it out like the cores (`cluster.processes.plan`); each worker takes its own use from
its part. Pages are of memory that the system grants when it is first written, so that a too large sum would show hours
later, as a kill: an upper bound is therefore always what is free at this moment.

On a device the part is a fraction of the card (`device_free_bytes`); what steps and graphs need of it is measured where
they are made (`engine.cuda`).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_GIB = 1 << 30

HOST_KV_SHARE = 0.5
"""Of a worker's part of a host. The rest is for page cache, router, clients, and growth."""

_NO_LIMIT = 1 << 62
"""cgroup v1 says "unlimited" with the largest page-aligned number of 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """Which part of the memory is this process's, beside the other workers."""

    host_bytes: int | None = None
    """Dealt out before any worker ran; None: nobody did, and `host_fraction` of what is there now is its part."""
    host_fraction: float = 1.0
    device_fraction: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """A measurement."""

    available_bytes: int
    """What could still be had without swapping, by the system and by every control group that contains us."""
    process_bytes: int
    """What this process has in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A measurement."""

    total_bytes: int
    free_bytes: int
    process_bytes: int
    """What this process's allocator and its context hold."""


def host_kv_bytes(memory: HostMemory, share: MemoryShare) -> int:
    """Return the bytes for KV pages in host memory. Raises ValueError when nothing is left."""
    part = share.host_bytes
    if part is None:
        part = int((memory.available_bytes + memory.process_bytes) * share.host_fraction)
    left = min(part - memory.process_bytes, memory.available_bytes)
    if left <= 0:
        raise ValueError(
            f"kv_memory_gib: auto finds no memory for KV pages: this worker's part of the host is {_gib(part)}, it uses"
            f" {_gib(memory.process_bytes)} already, and {_gib(memory.available_bytes)} are free"
        )
    return int(left * HOST_KV_SHARE)


def device_free_bytes(memory: DeviceMemory, share: MemoryShare) -> int:
    """Return what of a device's free memory is this process's; negative when it has outgrown its part."""
    return min(memory.free_bytes, int(memory.total_bytes * share.device_fraction) - memory.process_bytes)


def measure_host() -> HostMemory:
    """Measure now. A container's limit counts, not only the machine's memory."""
    available = psutil.virtual_memory().available
    headroom = cgroup_headroom_bytes()
    return HostMemory(
        available_bytes=available if headroom is None else min(available, headroom),
        process_bytes=psutil.Process().memory_info().rss,
    )


def cgroup_headroom_bytes(proc: Path = Path("/proc/self"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what the control groups around this process still grant; None without a limit.

    The tightest of all groups up to the root counts. A group's page cache that it could drop at once is not in use.
    """
    headrooms = [
        limit - used
        for folder, names in _cgroup_folders(proc, mount)
        if (limit := _read_number(folder / names.limit)) is not None
        and limit < _NO_LIMIT
        and (used := _used_bytes(folder, names)) is not None
    ]
    return max(0, min(headrooms)) if headrooms else None


@dataclass(frozen=True, slots=True)
class _Names:
    """What the files of a memory control group are called."""

    limit: str
    usage: str
    droppable: str
    """Key in memory.stat: cached file pages that were not used lately."""


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def _cgroup_folders(proc: Path, mount: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the folders of the groups that contain this process, inner ones first."""
    try:
        lines = (proc / "cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            root, names = mount, _V2
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", _V1
        else:
            continue
        # In a container the path may be the host's, with none of its folders below our mount: then the mount is ours.
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder, names
            folder = folder.parent
        yield root, names


def _used_bytes(folder: Path, names: _Names) -> int | None:
    usage = _read_number(folder / names.usage)
    if usage is None:
        return None
    with contextlib.suppress(OSError):
        for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == names.droppable:
                return max(0, usage - int(value))
    return usage


def _read_number(path: Path) -> int | None:
    """Return a file's number; None when it is not there or says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
