"""Checks the folder of the disk tier, and says what it is worth."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cluster.doctor.finding import DoctorFinding, failure, ok, warning
from common.config import ServingConfig

_GIB = 1 << 30
_SAMPLE_BYTES = 128 << 20
_PIECE_BYTES = 1 << 20
_SLOW_BYTES_PER_S = 200e6
_SUBJECT = "disk tier"


class FolderSpeed(NamedTuple):
    """Bytes per second of a folder, beside the system's own cache."""

    write: float
    read: float


def measure_folder(folder: Path, *, num_bytes: int = _SAMPLE_BYTES) -> FolderSpeed:
    """Write and read a file of random bytes that is nowhere but on the disk. Raises OSError."""
    piece = os.urandom(_PIECE_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began_s = time.monotonic()
        for _ in range(num_bytes // _PIECE_BYTES):
            file.write(piece)
        os.fsync(file.fileno())
        written_s = time.monotonic()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began_read_s = time.monotonic()
        while file.read(_PIECE_BYTES):
            pass
        return FolderSpeed(
            write=num_bytes / max(written_s - began_s, 1e-9),
            read=num_bytes / max(time.monotonic() - began_read_s, 1e-9),
        )


def check_tiers(config: ServingConfig) -> Iterator[DoctorFinding]:
    """Yield whether the folder of the disk tier takes what it is to take, and how fast. Takes a second."""
    tiers = config.tiers
    if tiers.path is None:
        return
    if not tiers.disk_gib:
        detail = f"there is none: tiers.path is {tiers.path}, tiers.disk_gib is 0"
        yield warning(_SUBJECT, detail, "set tiers.disk_gib, or remove tiers.path and this folder")
        return
    folder = tiers.path.expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = folder.stat().st_mode & 0o022
        speed = measure_folder(folder)
        stat = os.statvfs(folder)
    except OSError as error:
        yield failure(_SUBJECT, f"{folder}: {error.strerror}", "set tiers.path to a folder that this user can write")
        return
    if others:
        yield failure(_SUBJECT, f"others may write to {folder}", f"run chmod go-w {folder}")
        return
    free = stat.f_bavail * stat.f_frsize
    held = sum(_allocated(folder))
    num_workers = config.pools.prefill.count + config.pools.decode.count
    wanted = tiers.disk_gib * _GIB * num_workers
    rates = f"writes {speed.write / 1e9:.2f} GB/s, reads {speed.read / 1e9:.2f} GB/s"
    if free + held < wanted:
        detail = f"{(free + held) / _GIB:.1f} GiB for {num_workers} workers of {tiers.disk_gib:g} GiB; {rates}"
        yield warning(_SUBJECT, detail, "lower tiers.disk_gib, or make room; a full disk ends the tier's growth")
    elif speed.read < _SLOW_BYTES_PER_S:
        advice = "choose a faster disk: what is read more slowly than it is computed is computed"
        yield warning(_SUBJECT, rates, advice)
    else:
        yield ok(_SUBJECT, f"{rates}; {free / _GIB:.0f} GiB free")


def _allocated(folder: Path) -> Iterator[int]:
    for root, _folders, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield Path(root, name).stat().st_blocks * 512
