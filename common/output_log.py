"""The file that gets what a process writes to its standard streams, kept from growing for ever.

A full log becomes `<name>.log.1`, that one `.2`, and so on; the oldest goes. The process that writes does this itself,
from a thread of its own: it puts the new file in the place of descriptors 1 and 2 (`dup2`), so that nothing is lost,
and so that C libraries, which write to the descriptors and know of no logger, go on in the new file as well. Streams
that lead elsewhere, such as to a terminal, are left alone.
"""

import os
import sys
import threading
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 64 << 20
NUM_OLD_LOGS = 3
"""So a process keeps at most about 256 MiB."""
LOG_PATH_ENV = "KVRELAY_LOG_PATH"
"""Set by the launcher of a process whose streams are appended to a log: that file."""
_CHECK_S = 10.0
_STREAMS = (1, 2)
_MODE = 0o600


def send_output_to(path: Path) -> None:
    """Append what this process writes to its standard streams to `path`, C libraries included, and keep it small."""
    _switch(path, _STREAMS)
    watch_output(path)


def watch_output(path: Path | None = None) -> None:
    """Keep the log small that the standard streams lead to, from now on; by default the one that the environment names.

    The environment forgets it: it is not that of processes that this one starts.
    """
    named = os.environ.pop(LOG_PATH_ENV, None)
    log = path or (Path(named) if named else None)
    if log is not None:
        threading.Thread(target=_watch, args=(log,), name="log rotation", daemon=True).start()


def rotate_output(path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Begin a new log when this process writes to that one and it is full. Returns whether it did."""
    try:
        log = path.stat()
    except OSError:
        return False
    mine = [fd for fd in _STREAMS if os.path.samestat(os.fstat(fd), log)]
    if not mine or not rotate_log(path, max_bytes=max_bytes):
        return False
    _switch(path, mine)
    return True


def rotate_log(path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Put a log aside when it is full; who has it open writes on to the old one. Returns whether it was full."""
    try:
        if path.stat().st_size < max_bytes:
            return False
    except OSError:
        return False
    for number in range(NUM_OLD_LOGS - 1, 0, -1):
        if old_log(path, number).exists():
            old_log(path, number).replace(old_log(path, number + 1))
    path.replace(old_log(path, 1))
    return True


def old_log(path: Path, number: int) -> Path:
    """Return where a log was put aside; 1 is the youngest."""
    return path.with_name(f"{path.name}.{number}")


def open_log(path: Path) -> BinaryIO:
    """Open a log, which its owner alone may read, to append to it; puts a full one aside first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rotate_log(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE), "ab")


def _switch(path: Path, streams: "tuple[int, ...] | list[int]") -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE)
    for each in streams:
        os.dup2(fd, each)
    os.close(fd)


def _watch(path: Path) -> None:
    never = threading.Event()
    while not never.wait(_CHECK_S):
        try:
            rotate_output(path)
        except OSError:  # such as a full disk: it goes on writing, and tries again
            continue
