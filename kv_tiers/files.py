"""File operations of the disk tier: the seam where tests inject faults."""

import errno
import fcntl
import os
from pathlib import Path

from kv_tiers.faults import FaultKind, TierFault

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Files:
    """The system's files. Methods raise OSError; reads and writes may be short."""

    def open(self, path: Path) -> int:
        """Open or create a file of mode 0600 for reading and writing."""
        return os.open(path, _FLAGS, 0o600)

    def close(self, fd: int) -> None:
        """Close a file, and end its lock."""
        os.close(fd)

    def lock(self, fd: int) -> bool:
        """Lock a file for this opening of it; returns False where another one holds the lock. Ends with the process."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_at(self, fd: int, path: Path) -> bool:
        """Return whether a path leads to an open file."""
        try:
            return os.path.samestat(os.fstat(fd), path.lstat())
        except OSError:
            return False

    def size(self, fd: int) -> int:
        """Return a file's bytes."""
        return os.fstat(fd).st_size

    def resize(self, fd: int, size: int) -> None:
        """Cut a file, or let it grow by a hole."""
        os.ftruncate(fd, size)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read some bytes; returns how many, 0 at the end of the file."""
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some bytes; returns how many."""
        return os.pwrite(fd, data, offset)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def sync(self, fd: int) -> None:
        """Wait until a file's bytes are on the device."""
        os.fdatasync(fd)


def read_whole(files: Files, fd: int, into: memoryview, offset: int) -> None:
    """Fill `into` from a place in a file. Raises TierFault."""
    while into:
        try:
            count = files.read(fd, into, offset)
        except OSError as error:
            raise TierFault(FaultKind.IO_ERROR, f"cannot read: {error.strerror or error}") from error
        if not count:
            raise TierFault(FaultKind.TRUNCATED, f"cannot read {len(into)} bytes at {offset}: the file ends before")
        into, offset = into[count:], offset + count


def write_whole(files: Files, fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to a place in a file. Raises TierFault."""
    while data:
        try:
            count = files.write(fd, data, offset)
        except OSError as error:
            raise fault_of(error, "write") from error
        if not count:
            raise TierFault(FaultKind.IO_ERROR, f"cannot write {len(data)} bytes at {offset}: the system took none")
        data, offset = data[count:], offset + count


def fault_of(error: OSError, verb: str) -> TierFault:
    """Return the fault that an error of the system is."""
    kind = FaultKind.FULL if error.errno in _NO_SPACE else FaultKind.IO_ERROR
    return TierFault(kind, f"cannot {verb}: {error.strerror or error}")
