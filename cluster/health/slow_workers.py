"""Decides which slow workers are kept out of use, and for how long. Pure, with an injected clock.

    in use ──slow for slow_drain_s──▶ kept out ──no longer slow for RETURN_S──▶ in use
                                       │     ▲
                                       └─────┘ still slow after REPLACE_S: a new process, then after twice as long …

A worker that is kept out drains: its answers move to others, and it gets nothing new. Trials (trial.py) keep its timing
model fresh, and show when it has recovered. A new process helps against what is wrong with a process, such as memory
that was swapped out; where the host is slow, it stays out. A worker that no trial can measure is used again.

A pool keeps at least one worker that is well: slowness is relative to the others of a pool, so there is one.
"""

from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from enum import Enum

from cluster.health.worker_health import WorkerHealth
from common.clock import Clock

RETURN_S = 5.0
"""Time for which a worker that is kept out must not be slow before it is used again."""
UNMEASURED_S = 60.0
"""Time without any measurement after which a worker is used again."""
REPLACE_S, MAX_REPLACE_S = 60.0, 960.0
"""Time of slowness after which a worker gets a new process: at first, and at most, since it doubles each time."""


class SlowWorkerAction(Enum):
    """A step for one worker."""

    KEEP_OUT = "keep out"
    TAKE_BACK = "take back"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerObservation:
    """One worker at one look."""

    name: str
    pool: Hashable
    """Equal for workers that can take each other's requests."""
    slow_drain_s: float | None
    """Time of slowness after which it is kept out; None: never."""
    is_in_use: bool
    """Whether it serves and takes requests."""
    is_kept_out: bool
    is_empty: bool = True
    """Whether it serves no request; only asked of a worker that is kept out."""
    health: WorkerHealth | None
    """Outcomes of its attempts, of all routers; None: no router knows it now."""

    @property
    def is_well(self) -> bool:
        """Whether it takes requests and is not slow."""
        return self.is_in_use and self.health is not None and not self.health.is_slow


@dataclass(slots=True)
class _Stay:
    """The time of one worker out of use."""

    since_s: float
    """Beginning of the stay, or of the present process."""
    patience_s: float = REPLACE_S
    well_since_s: float | None = None


class SlowWorkers:
    """Remembers since when workers are slow, and those that are kept out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slow_since_s: dict[str, float] = {}
        self._stays: dict[str, _Stay] = {}

    def look(self, workers: Collection[WorkerObservation]) -> dict[str, SlowWorkerAction]:
        """Return what to do now. The caller carries it out before the next look."""
        now_s = self._clock.monotonic()
        for name in self._stays.keys() - {worker.name for worker in workers if worker.is_kept_out}:
            del self._stays[name]
        slow = {worker.name for worker in workers if worker.health is not None and worker.health.is_slow}
        self._slow_since_s = {name: self._slow_since_s.get(name, now_s) for name in slow}
        actions: dict[str, SlowWorkerAction] = {}
        for worker in workers:
            if worker.is_kept_out and (action := self._judge(worker, now_s)) is not None:
                actions[worker.name] = action
        num_well = Counter(worker.pool for worker in workers if worker.is_well)
        for worker in workers:
            is_due = (
                worker.is_in_use
                and worker.slow_drain_s is not None
                and worker.name in slow
                and now_s - self._slow_since_s[worker.name] >= worker.slow_drain_s
            )
            if is_due and num_well[worker.pool]:
                self._stays[worker.name] = _Stay(now_s)
                actions[worker.name] = SlowWorkerAction.KEEP_OUT
        return actions

    def _judge(self, worker: WorkerObservation, now_s: float) -> SlowWorkerAction | None:
        stay = self._stays.setdefault(worker.name, _Stay(now_s))
        health = worker.health or WorkerHealth()
        if health.is_slow:
            stay.well_since_s = None
            if worker.is_empty and now_s - stay.since_s >= stay.patience_s:
                stay.since_s, stay.patience_s = now_s, min(2 * stay.patience_s, MAX_REPLACE_S)
                return SlowWorkerAction.REPLACE
            return None
        if health.slowness is None:
            stay.well_since_s = None
            return SlowWorkerAction.TAKE_BACK if now_s - stay.since_s >= UNMEASURED_S else None
        if stay.well_since_s is None:
            stay.well_since_s = now_s
        return SlowWorkerAction.TAKE_BACK if now_s - stay.well_since_s >= RETURN_S else None
