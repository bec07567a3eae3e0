"""One supervisor per run folder, without races: a kernel lock that ends with its holder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunDirTaken(Exception):
    """Another supervisor runs in this folder."""


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises RunDirTaken at once when another process holds it."""
    # Python opens it close-on-exec: no child keeps the lock after its holder has died.
    fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirTaken(f"another cluster runs in {run_dir}; stop it first, or use another name") from None
        yield
    finally:
        os.close(fd)
