"""What a load test is given, and whom it tells."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.slo import Slo
from measure.load.records import PoolSample, RequestRecord, Run
from measure.load.targets.interface import TargetInfo, TargetSpec
from measure.workload.sessions import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """One load test."""

    name: str
    target: TargetSpec
    workload: Workload
    """Built already (`measure.workload.build`): its limits, `duration_s` and `max_requests`, are the run's."""
    specification: Mapping[str, Any] = field(default_factory=dict)
    """What the workload was built from, as JSON; kept with the results."""
    slo: Slo | None = None
    """Sent along as each request's objectives, to targets that take them. None: the server's own hold."""
    timeout_s: float = 600.0
    """For a request, from its sending."""
    drain_s: float = 120.0
    """How long running sessions may go on after `workload.duration_s`, before they are cancelled."""
    processes: int | None = None
    """Generator processes; None: one, and more when those there are get busy."""
    max_processes: int | None = None
    """Most that are started of their own accord; None: as many as this process may use cores."""
    sample_period_s: float = 0.5
    """Between two looks at the pools."""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is known when the first request is about to become due."""

    name: str
    target: TargetInfo
    workload: Workload


class Observer(Protocol):
    """Is told what happens while it happens, on the event loop that runs `run_load`. Must not block it for long."""

    def started(self, start: RunStart) -> None:
        """Requests are about to be sent."""

    def record(self, request: RequestRecord) -> None:
        """Take a request that has ended, some tens of milliseconds ago; about in order of their ends."""

    def sample(self, sample: PoolSample) -> None:
        """Take the state of the pools."""


class Observers:
    """Forwards every call to each of several observers, in their order; to none of them by default."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self, start: RunStart) -> None:
        """Tell that requests are about to be sent."""
        for observer in self._observers:
            observer.started(start)

    def record(self, request: RequestRecord) -> None:
        """Tell of a request that has ended."""
        for observer in self._observers:
            observer.record(request)

    def sample(self, sample: PoolSample) -> None:
        """Tell the state of the pools."""
        for observer in self._observers:
            observer.sample(sample)


class LoadTestFailed(Exception):
    """The generator itself broke; says how, and keeps what was measured before."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run
