"""Files of the disk tier that fail as told: the seam of `tier_faults.py` and of tests."""

import errno
from collections.abc import Callable
from pathlib import Path

from kv_tiers.files import Files


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
