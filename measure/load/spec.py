"""Input of a load test, and its observers."""

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
    """Built workload (`measure.workload.build`), whose limits `duration_s` and `max_requests` hold for the run."""
    specification: Mapping[str, Any] = field(default_factory=dict)
    """Specification of the workload as JSON, kept with the results."""
    slo: Slo | None = None
    """Objectives of the run. None: those of the server."""
    states_objectives: bool = True
    """Whether each request names them, to targets that take them."""
    timeout_s: float = 600.0
    drain_s: float = 120.0
    """Time after `workload.duration_s` at which running sessions are cancelled."""
    processes: int | None = None
    """Generator processes; None: one, and more when all are busy, up to one per core that this process may use."""
    sample_period_s: float = 0.5
    """Time between two samples of the pools."""
    labels: Mapping[str, str] = field(default_factory=dict)


class Observer(Protocol):
    """Follows a run, on the event loop that runs `run_load`, which it must not block for long."""

    def started(self, spec: LoadSpec, target: TargetInfo) -> None:
        """Take the start of the run; requests are about to be sent."""

    def record(self, request: RequestRecord) -> None:
        """Take a request that ended some tens of milliseconds ago; roughly in order of their ends."""

    def sample(self, sample: PoolSample) -> None:
        """Take a sample of the pools."""


class LoadTestFailed(Exception):
    """The generator itself failed; carries the run so far."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run
