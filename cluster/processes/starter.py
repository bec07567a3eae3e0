"""The link between a starting supervisor and the process that started it, until the cluster is ready. Both ends.

The supervisor reports its progress as JSON lines on stdout. The starter holds the other end of its stdin and writes
`detach` once it has read `ready`. If stdin ends without that, for example after Ctrl-C, no process waits for the
cluster any more, and the supervisor stops the half-started cluster.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from cluster.processes.run_dir import log_path, log_tail
from common.log import LOG_PATH_ENV, open_log

_DETACH = b"detach\n"
_STOP_TIMEOUT_S = 60.0
_DEATH_TIMEOUT_S = 5.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStep:
    """A step was made."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """The cluster serves."""

    addresses: tuple[str, ...]
    """host:port of each router, as a client dials it."""
    http_addresses: tuple[str, ...]
    """host:port of their HTTP doors; empty without any."""
    pid: int
    """The supervisor."""
    tls: bool | str
    """How clients on this host connect to its doors, as `kvrelay.client.tls.Tls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """The cluster does not serve; all its processes are stopped again."""

    reason: str
    key: str = ""
    """Key of serving.yaml that asks for what cannot be had; empty without one."""


Event = StartStep | Up | StartFailure
_EVENTS: dict[str, type[Event]] = {"progress": StartStep, "ready": Up, "failed": StartFailure}
_NAMES = {kind: name for name, kind in _EVENTS.items()}


def parse_event(line: str) -> Event | None:
    """Return the event of a line from the supervisor, or None for any other line."""
    try:
        entry = json.loads(line)
        kind: Any = _EVENTS[entry.pop("event")]
        event: Event = kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
        return event
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class StartListener(Protocol):
    """Receives the progress of a cluster's start."""

    def notify(self, event: Event) -> None:
        """Receive a step, or the outcome."""


class Starter:
    """The supervisor's end: a `StartListener`. Event loop only, but for `notify` of a failure, which may precede it."""

    def __init__(self, *, stdin_fd: int | None, events: TextIO) -> None:
        self._stdin_fd = stdin_fd
        self._events = events

    @classmethod
    def attached(cls) -> "Starter":
        """Return the link over our stdin and stdout. All other output to stdout goes to stderr from now on."""
        events = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        return cls(stdin_fd=0, events=events)

    @classmethod
    def absent(cls) -> "Starter":
        """Return a link without a waiting process; progress is still printed."""
        return cls(stdin_fd=None, events=sys.stdout)

    def watch(self, *, gone: Callable[[], None]) -> None:
        """Call `gone` if the starter disappears without having detached."""
        if self._stdin_fd is None:
            return
        fd, loop, received = self._stdin_fd, asyncio.get_running_loop(), bytearray()

        def readable() -> None:
            chunk = os.read(fd, 64)
            received.extend(chunk)
            if not chunk or _DETACH in received:
                loop.remove_reader(fd)
            if not chunk and _DETACH not in received:
                gone()

        loop.add_reader(fd, readable)

    def notify(self, event: Event) -> None:
        """Send an event."""
        with contextlib.suppress(BrokenPipeError):  # the starter is gone, which `watch` handles
            self._events.write(json.dumps({"event": _NAMES[type(event)], **asdict(event)}) + "\n")
            self._events.flush()


def start_supervisor(run_dir: Path, report: Report) -> Up | StartFailure:
    """Start a supervisor and return when its cluster serves, or why it does not. Blocks.

    An exception, such as KeyboardInterrupt, ends the supervisor and what it has started before it is raised on.
    """
    path = log_path(run_dir, "supervisor")
    command = [sys.executable, "-P", "-m", "cluster.owner", "--attached"]
    with open_log(path) as log:
        offset = log.tell()
        process = subprocess.Popen(
            [*command, "--run-dir", str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, LOG_PATH_ENV: str(path)},
            text=True,
            start_new_session=True,
        )
    # Reaps it whenever it ends, so that a long-lived caller keeps no zombie. Does not delay the caller's exit.
    reaper = threading.Thread(target=process.wait, name="reap-supervisor", daemon=True)
    reaper.start()
    assert process.stdin is not None
    assert process.stdout is not None
    is_up = False
    try:
        outcome = _follow(process.stdout, report)
        if outcome is None:
            reaper.join(_DEATH_TIMEOUT_S)
            tail = log_tail(path, offset=offset)
            outcome = StartFailure(reason=f"the supervisor died while starting; {path} ends with\n{tail}")
        if isinstance(outcome, Up):
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(_DETACH.decode())
                process.stdin.flush()
            is_up = True
        return outcome
    except KeyboardInterrupt:
        report("interrupted: stopping what was started")
        raise
    finally:
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if not is_up:  # its stdin has ended without `detach`: it stops what it has started
            reaper.join(_STOP_TIMEOUT_S)


def _follow(events: Iterable[str], report: Report) -> Up | StartFailure | None:
    """Report progress until the supervisor reports the outcome. None: it is gone."""
    for line in events:
        match parse_event(line):
            case StartStep(text=text):
                report(text)
            case Up() | StartFailure() as outcome:
                return outcome
    return None
