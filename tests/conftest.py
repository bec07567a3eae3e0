"""Settings of the whole suite."""

import functools
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
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
_WAITING = (
    _HOSTS,
    "tests/e2e/test_controller.py",
    "tests/e2e/test_oracle.py",
    "tests/measure/load/test_run.py",
    "tests/measure/experiment/test_real.py",
    "tests/router/test_held_loop.py",
    "tests/e2e/test_document_commands.py",
    "tests/e2e/test_process_failures.py",
    "tests/e2e/test_ranks.py",
    "tests/e2e/test_tls.py",
    "tests/e2e",
    "tests/common/test_rpc",
    "tests/benchmarks/test_quick_runs.py",
    "tests/cluster/test_",
    "tests/foreign",
)
"""Tests that mostly wait for processes to start, end or stop, one that times a process, and the other end-to-end tests;
the longest first, so that none of them runs alone at the end."""
_COMPUTING = (
    "tests/engine/triton_kernels/test_compile.py",
    "tests/benchmarks/test_cuda_smoke.py",
    "tests/measure/simulate/test_chaos.py",
    "tests/engine/test_ranks.py",
    "tests/engine",
    "tests/measure",
)
"""The longest of the others, likewise."""
_NICENESS = 5, 10
"""Niceness of processes that run waiting tests and of those that run the others. Tests on hosts have their own
(tests/hosts/conftest.py)."""
_MOST_BYTES = 12 << 30
"""Memory of each process: one that grows without end fails by itself, and says where, before it takes the machine's."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        os.nice(_NICENESS[not _is_for_waiting(config.workerinput)])


def _is_for_waiting(workerinput: Mapping[str, Any]) -> bool:
    """Return whether a process runs waiting tests while there are any: half of them do.

    With fewer, the waiting tests would finish last; with more, the cores would be idle at first.
    """
    number, count = int(workerinput["workerid"].removeprefix("gw")), int(workerinput["workercount"])
    return number < count // 2


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure when it happens: what ends a run before its summary must not hide it."""
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-4000:]}", file=sys.__stderr__, flush=True)


def pytest_collection() -> None:
    """Collect no garbage among the millions of objects of the modules that are being imported; they all stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000)  # at the default of 700, collecting takes a tenth of the suite's time
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _position(item.nodeid, _WAITING + _COMPUTING))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return what keeps the tests of a file in one process, and runs waiting tests beside those that compute.

    Marks (`--dist loadgroup`) have no effect: xdist 3.8 writes them into an attribute that pytest 9.2 does not read.
    """
    from xdist.scheduler import LoadFileScheduling  # a machine without xdist runs the tests, too

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _assign_work_unit(self, node: Any) -> None:
            is_for_waiting = _is_for_waiting(node.workerinput)
            for scope in self.workqueue:
                if scope.startswith(_WAITING) == is_for_waiting:
                    self.workqueue.move_to_end(scope, last=False)
                    break
            super()._assign_work_unit(node)

        def _split_scope(self, nodeid: str) -> str:
            return _HOSTS if nodeid.startswith(_HOSTS) else super()._split_scope(nodeid)

    return ByFile(config, log)


def _position(name: str, beginnings: Sequence[str]) -> int:
    return next((idx for idx, beginning in enumerate(beginnings) if name.startswith(beginning)), len(beginnings))


@functools.cache
def _rates(meter: Any, **options: Any) -> Any:
    return meter(**options).measure()


@pytest.fixture(scope="module")
def rates_measured_once() -> Iterator[None]:
    """Measure the device once for each dtype: at every load that would take longer than most tests' models."""
    from engine.model import floors  # and torch, which most tests need not

    rates = functools.partial(_rates, floors.RateMeter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floors, "RateMeter", lambda **options: SimpleNamespace(measure=lambda: rates(**options)))
        yield
