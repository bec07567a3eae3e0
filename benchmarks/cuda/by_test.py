"""A plugin of pytest: tests of one file run in several processes, too, since a few files have most of the work."""

import resource
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScheduling:
    """Return what hands out tests one by one, in place of the suite's own."""
    return LoadScheduling(config, log)


def pytest_sessionstart() -> None:
    """Lift the suite's bound on a process's memory: a device's driver may map more."""
    most_bytes = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
