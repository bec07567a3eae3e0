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
    used_s = 3.0

    def pass_time(self, seconds: float, *, num_idle: float, num_used: float = 0.0) -> None:
        self.now_s += seconds
        self.idle_s += seconds * num_idle
        self.used_s += seconds * num_used

    @property
    def idle(self) -> float:
        return self.idle_s


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(psutil, "cpu_times", lambda: host)
    monkeypatch.setattr(time, "monotonic", lambda: host.now_s)
    monkeypatch.setattr(time, "process_time", lambda: host.used_s)
    monkeypatch.setattr("worker.environment.usable_cores", lambda: 4)
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


def test_idle_cores_of_the_host_beyond_a_containers_limit_are_promised_to_no_worker(host: Host) -> None:
    cores = HostCores()
    host.pass_time(20, num_idle=60.0, num_used=3.0)
    assert cores.num_idle == pytest.approx(1.0)
