"""The link between a starting supervisor and whoever started it, until the cluster is ready.

The supervisor tells its progress as JSON lines on stdout. The starter holds the other end of its stdin and writes
`detach` once it has seen `ready`; an end of stdin without that means that nobody waits any more (Ctrl-C, a kill), and
a half-started cluster must not stay behind.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol, TextIO

DETACH = b"detach\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A step was made."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """The cluster serves."""

    addresses: tuple[str, ...]
    """Of the routers."""
    http_addresses: tuple[str, ...]
    """Of their HTTP doors; empty without any."""
    pid: int
    """The supervisor."""
    tls: bool | str
    """How clients on this host connect to its doors, as `kvrelay.client.tls.Tls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """It will not; everything was stopped again."""

    reason: str


def parse_event(line: str) -> Progress | Up | Failed | None:
    """Return what a line from the supervisor says, or None for any other line."""
    try:
        entry = json.loads(line)
        match entry["event"]:
            case "progress":
                return Progress(text=entry["text"])
            case "ready":
                addresses, http_addresses = tuple(entry["addresses"]), tuple(entry["http_addresses"])
                return Up(addresses=addresses, http_addresses=http_addresses, pid=entry["pid"], tls=entry["tls"])
            case "failed":
                return Failed(reason=entry["reason"])
    except (ValueError, TypeError, KeyError):
        pass
    return None


class Audience(Protocol):
    """Who hears how a cluster comes up."""

    def report(self, text: str) -> None:
        """Hear of a step."""

    def ready(self, up: Up) -> None:
        """Hear that the cluster serves, and where."""

    def failed(self, reason: str) -> None:
        """Hear why it does not."""


class Starter:
    """An Audience at the other end of a pipe. Event loop only, but for `failed`, which may come before one runs."""

    def __init__(self, *, stdin_fd: int | None, events: TextIO) -> None:
        self._stdin_fd = stdin_fd
        self._events = events

    @classmethod
    def attached(cls) -> "Starter":
        """Somebody waits on our stdin and stdout. From now on, whoever else prints prints to stderr."""
        events = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        return cls(stdin_fd=0, events=events)

    @classmethod
    def absent(cls) -> "Starter":
        """Nobody waits; progress is still printed."""
        return cls(stdin_fd=None, events=sys.stdout)

    def watch(self, *, gone: Callable[[], None]) -> None:
        """Call `gone` when the starter goes away without having detached."""
        if self._stdin_fd is None:
            return
        fd, loop, received = self._stdin_fd, asyncio.get_running_loop(), bytearray()

        def readable() -> None:
            chunk = os.read(fd, 64)
            received.extend(chunk)
            if not chunk or DETACH in received:
                loop.remove_reader(fd)
            if not chunk and DETACH not in received:
                gone()

        loop.add_reader(fd, readable)

    def report(self, text: str) -> None:
        """Tell a step."""
        self._tell({"event": "progress", "text": text})

    def ready(self, up: Up) -> None:
        """Tell that the cluster serves, and where."""
        self._tell({"event": "ready", **asdict(up)})

    def failed(self, reason: str) -> None:
        """Tell why it does not."""
        self._tell({"event": "failed", "reason": reason})

    def _tell(self, event: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens, which `watch` deals with
            self._events.write(json.dumps(event) + "\n")
            self._events.flush()
