"""Cores that a worker's host had idle."""

import time

import psutil
import pytest

from worker.environment import HostCores


class Host:
    """A host whose idle time and clock a test moves."""

    now_s = 1000.0
    idle_s = 50.0
    iowait = 0.0

    def pass_time(self, seconds: float, *, num_idle: float) -> None:
        self.now_s += seconds
        self.idle_s += seconds * num_idle

    @property
    def idle(self) -> float:
        return self.idle_s


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(psutil, "cpu_times", lambda: host)
    monkeypatch.setattr(time, "monotonic", lambda: host.now_s)
    return host


def test_idle_cores_are_those_of_the_last_minute(host: Host) -> None:
    cores = HostCores()
    host.pass_time(20, num_idle=2.0)
    assert cores.num_idle == pytest.approx(2.0)
    for _ in range(12):
        host.pass_time(10, num_idle=0.5)
        cores.note()
    assert cores.num_idle == pytest.approx(0.5), "an idle hour before the load would promise cores that are gone"


def test_worker_that_has_just_started_tells_without_dividing_by_no_time(host: Host) -> None:
    assert HostCores().num_idle == 0.0
