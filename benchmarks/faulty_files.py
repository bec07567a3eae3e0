"""Files of the disk tier that fail as told: the seam of `tier_faults.py`, `tier_faults_worker.py` and tests."""

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kv_tiers.files import Files

_SLOW_S = 0.06
"""A read of this time takes longer than computing."""


class Killed(BaseException):
    """The process ends here, as after SIGKILL: nothing of it runs any more."""


class FaultyFiles(Files):
    """The system's files; `before_write` and `before_read` may raise, or say how many bytes are moved."""

    def __init__(self) -> None:
        self.before_write: Callable[[Path, int], int | None] = lambda path, num_bytes: None
        self.before_read: Callable[[Path, int], int | None] = lambda path, num_bytes: None
        self._paths: dict[int, Path] = {}

    def open(self, path: Path) -> int:
        """See `kv_tiers.files.Files`."""
        fd = super().open(path)
        self._paths[fd] = path
        return fd

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """See `kv_tiers.files.Files`."""
        most = self.before_read(self._paths[fd], len(into))
        return super().read(fd, into[:most], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """See `kv_tiers.files.Files`."""
        most = self.before_write(self._paths[fd], len(data))
        return super().write(fd, data[:most], offset)

    def remove(self, path: Path) -> None:
        """See `kv_tiers.files.Files`."""
        self.before_write(path, 0)
        super().remove(path)

    def kill(self) -> None:
        """End all locks, as the kernel does."""
        for fd in self._paths:
            try:
                super().close(fd)
            except OSError as error:
                assert error.errno == errno.EBADF
        self._paths.clear()


def failing(code: int, *names: str) -> Callable[[Path, int], None]:
    """Return a hook that fails for files of these names, or for all."""

    def fail(path: Path, num_bytes: int) -> None:
        if not names or path.name in names:
            raise OSError(code, "injected")

    return fail


class WorkerFiles(FaultyFiles):
    """Files of one worker's disk with faults that are armed, and what has happened. Any thread."""

    def __init__(self, counts: "Counter[str]") -> None:
        super().__init__()
        self.before_read, self.before_write = self._before_read, self._before_write
        self.counts = counts
        self.armed: Counter[str] = Counter()
        self.on_read: Callable[[], object] | None = None
        """Called once, in the thread that reads."""
        self.is_dead = False
        self._lock = threading.Lock()

    def fires(self, kind: str) -> bool:
        """Use up one armed fault of a kind."""
        with self._lock:
            if self.armed[kind] <= 0:
                return False
            self.armed[kind] -= 1
            self.counts[kind] += 1
            return True

    def open(self, path: Path) -> int:
        """See `kv_tiers.files.Files`."""
        self._check()
        return super().open(path)

    def _before_read(self, path: Path, num_bytes: int) -> int | None:
        self._check()
        if path.name != "blocks":
            return None
        with self._lock:
            on_read, self.on_read = self.on_read, None
        if on_read is not None:
            on_read()
        if self.fires("slow read"):
            time.sleep(_SLOW_S)
        if self.fires("read error"):
            raise OSError(errno.EIO, "injected")
        return max(1, num_bytes // 2) if self.fires("short read") else None

    def _before_write(self, _path: Path, num_bytes: int) -> int | None:
        self._check()
        if not num_bytes:  # a removal
            return None
        if self.fires("disk full"):
            raise OSError(errno.ENOSPC, "injected")
        if self.fires("write error"):
            raise OSError(errno.EIO, "injected")
        if self.fires("killed while it writes"):
            self.is_dead = True
            return num_bytes // 2
        return None

    def _check(self) -> None:
        if self.is_dead:
            raise OSError(errno.EIO, "the process has ended")
