"""Limits of the control groups around this process (cgroup v1 and v2): memory, and time on cores.

A container or a unit of systemd may have less than its host, which the host's own figures do not show.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 62
"""Smallest limit that means "unlimited": cgroup v1 uses the largest page-aligned number of 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupFiles:
    """Where the system shows this process's groups."""

    proc: Path = Path("/proc/self")
    mount: Path = Path("/sys/fs/cgroup")


_OWN = CgroupFiles()


def usable_cores(files: CgroupFiles = _OWN) -> int:
    """Return how many cores this process can keep busy: those it may run on, within its groups' quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(files)
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(files: CgroupFiles = _OWN) -> float | None:
    """Return the cores' worth of time that the tightest group grants; None without a quota."""
    quotas = [quota for folder, is_v2 in _folders("cpu", files) if (quota := _quota(folder, is_v2=is_v2)) is not None]
    return min(quotas, default=None)


def memory_headroom_bytes(files: CgroupFiles = _OWN) -> int | None:
    """Return the bytes that the tightest group still grants; None without a limit.

    Page cache that a group could drop at once does not count as used.
    """
    headrooms = [
        limit - used
        for folder, is_v2 in _folders("memory", files)
        if (limit := _read_number(folder / (_V2 if is_v2 else _V1).limit)) is not None
        and limit < _NO_LIMIT
        and (used := _used_bytes(folder, _V2 if is_v2 else _V1)) is not None
    ]
    return max(0, min(headrooms)) if headrooms else None


@dataclass(frozen=True, slots=True)
class _Names:
    """File names of a memory control group."""

    limit: str
    usage: str
    droppable: str
    """Key in memory.stat of the cached file pages that were not used lately."""


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def _folders(controller: str, files: CgroupFiles) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the groups that contain this process, inner ones first, and whether each is of version 2."""
    try:
        lines = (files.proc / "cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = hierarchy == "0"
        if not is_v2 and controller not in controllers.split(","):
            continue
        root = files.mount if is_v2 else files.mount / controller
        if not root.is_dir():  # without the usual link of that name
            root = files.mount / controllers
        # In a container the path may be the host's, with none of its folders below our mount: the mount then counts.
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder, is_v2
            folder = folder.parent
        yield root, is_v2


def _quota(folder: Path, *, is_v2: bool) -> float | None:
    """Return how many cores a group may keep busy; None without a quota, which is "max" in version 2 and -1 in 1."""
    with contextlib.suppress(OSError, ValueError):
        names = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        granted_us, period_us = map(int, " ".join((folder / name).read_text("ascii") for name in names).split())
        if granted_us > 0 and period_us > 0:
            return granted_us / period_us
    return None


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
    """Return a file's number; None when the file is missing or says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
