"""Tests on hosts go before all others where processes compete."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def first_in_line() -> Iterator[None]:
    """The head of a Ray cluster gives up starting after 15 s without a core."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if os.geteuid() == 0:  # without it these tests are skipped
        os.setpriority(os.PRIO_PROCESS, 0, min(niceness, 0))
    yield
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
