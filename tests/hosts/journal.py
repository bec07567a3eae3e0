"""Log of the events on test hosts, printed as they happen."""

import sys
import time
from collections.abc import Collection

from tests.hosts.network import Host

_MIB = 1 << 20


class Journal:
    """Writes a line for each step on stdout: seconds since its start, memory of all hosts together, and the text."""

    def __init__(self, hosts: Collection[Host]) -> None:
        self._hosts = hosts
        self._started_s = time.monotonic()

    def title(self, text: str) -> None:
        """Write a heading."""
        _write(f"\n{text}\n     time    memory  (PSS of everything on {len(self._hosts)} hosts)")

    def note(self, text: str) -> None:
        """Write a step that is over; further lines of `text` are set in."""
        first, *others = text.splitlines()
        elapsed_s = time.monotonic() - self._started_s
        memory = sum(host.pss_bytes() for host in self._hosts) / _MIB
        _write(f"{elapsed_s:7.1f} s{memory:6.0f} MiB  {first}")
        for line in others:
            _write(" " * 21 + line.rstrip())


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
