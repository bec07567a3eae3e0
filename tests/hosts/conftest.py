"""Tests on hosts go before all others where processes compete."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
"""While it is 1, Linux compares niceness only within a session, and every process of a cluster has its own."""


@pytest.fixture(scope="module", autouse=True)
def first_in_line() -> Iterator[None]:
    """The head of a Ray cluster gives up starting after 15 s without a core."""
    if os.geteuid() != 0:  # these tests are skipped
        yield
        return
    niceness, before = os.getpriority(os.PRIO_PROCESS, 0), ""
    os.setpriority(os.PRIO_PROCESS, 0, min(niceness, 0))
    with suppress(OSError):  # a container may not change it
        before = _AUTOGROUP.read_text(encoding="ascii")
        _AUTOGROUP.write_text("0", encoding="ascii")
    yield
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    if before:
        with suppress(OSError):
            _AUTOGROUP.write_text(before, encoding="ascii")
