"""Structured logs: one JSON object per line on stderr, with the request id where one exists; and their rotation.

A full log becomes `<name>.log.1`, that one `.2`, and so on; the oldest is deleted. The writing process rotates its own
log, from a separate thread: it replaces descriptors 1 and 2 by the new file (`dup2`), so that no output is lost and C
libraries, which write to the descriptors directly, continue in the new file too. Streams that lead elsewhere, such as
to a terminal, are left alone.
"""

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: ts, level, process, logger, msg, and every `extra` field.

    Fields that begin with an underscore are left out: libraries (Ray) attach them to every record.
    """

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        entry: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        entry.update({k: v for k, v in record.__dict__.items() if k not in _STANDARD and not k.startswith("_")})
        if record.exc_info:
            entry["exc"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def setup_logging(process_name: str) -> None:
    """Send the root logger to stderr as JSON lines, and rotate the log file behind stderr. Call once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    watch_output()


MAX_LOG_BYTES = 64 << 20
NUM_OLD_LOGS = 3
"""Rotated logs that are kept; together with the current one at most about 256 MiB per process."""
LOG_PATH_ENV = "KVRELAY_LOG_PATH"
"""Names the log file to a process whose launcher appends its streams to one."""
_CHECK_S = 10.0
_STREAMS = (1, 2)
_MODE = 0o600


def send_output_to(path: Path) -> None:
    """Append the standard streams of this process, C libraries included, to `path`, and rotate it."""
    _switch(path, _STREAMS)
    watch_output(path)


def watch_output(path: Path | None = None) -> None:
    """Rotate the log of the standard streams from now on; by default the file that the environment names.

    Removes the variable from the environment: it does not apply to child processes.
    """
    named = os.environ.pop(LOG_PATH_ENV, None)
    log = path or (Path(named) if named else None)
    if log is not None:
        threading.Thread(target=_watch, args=(log,), name="log rotation", daemon=True).start()


def rotate_output(path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Begin a new log if `path` is full and this process writes to it. Returns whether it did."""
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
    """Rename a log if it is full; processes that have it open keep writing to it. Returns whether it was full."""
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
    """Return the path of a rotated log; 1 is the youngest."""
    return path.with_name(f"{path.name}.{number}")


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending, readable by its owner alone; rotates a full one first."""
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
        except OSError:  # such as a full disk: keeps writing, and tries again
            continue
