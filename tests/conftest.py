"""Settings of the whole suite."""

import gc
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Without a GPU Triton's kernels run in its interpreter. The variable must be set before anything imports triton, as
# transformers does.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Several processes share the cores, where threads of torch that wait for each other spin. A cluster's plan tells its
# workers their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without a terminal starts commands in the background deaf to interrupts, and they pass that on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In CI the same examples each time: a new counterexample belongs to the person who looks for it, not to whose change is
# being tested. Everywhere else Hypothesis keeps searching. How long an example takes says nothing on a busy machine.
_slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=_slow)
hypothesis.settings.register_profile("here", deadline=None, suppress_health_check=_slow)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")

_HOSTS = "tests/hosts"
"""One process runs all of its tests, from the beginning on: they wait a lot, and would else be alone at the end."""
_FIRST = (
    _HOSTS,
    "tests/e2e/test_oracle.py",
    "tests/common/test_rpc_server.py",
    "tests/e2e/test_scale.py",
    "tests/e2e",
    "tests/cluster",
    "tests/benchmarks",
    "tests/measure/experiment",
)
"""The longest tests begin first, so that no process ends alone with one of them."""
_NICENESS = 5
"""Niceness of all tests except those on hosts (tests/hosts/conftest.py)."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        os.nice(_NICENESS)


def pytest_collection() -> None:
    """Collect no garbage among the millions of objects of the modules that are being imported; they all stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _position(item.nodeid, _FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return what keeps the tests of a file in one process, and all tests on hosts.

    Marks (`--dist loadgroup`) have no effect: xdist 3.8 writes them into an attribute that pytest 9.2 does not read.
    """
    from xdist.scheduler import LoadFileScheduling  # a machine without xdist runs the tests, too

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _HOSTS if nodeid.startswith(_HOSTS) else super()._split_scope(nodeid)

    return ByFile(config, log)


def _position(name: str, beginnings: Sequence[str]) -> int:
    return next((idx for idx, beginning in enumerate(beginnings) if name.startswith(beginning)), len(beginnings))
