"""How long workers of a cluster take to start and to go: measured on its own, guessed before."""

from collections import deque
from collections.abc import Mapping
from statistics import median

from cluster.planner.observation import Pool
from cluster.processes.plan import ProcessRole

_NUM_LATEST = 9


class ChangeTimes:
    """The latest starts and drains of each pool, in seconds."""

    def __init__(self, *, guessed_start_s: float = 30.0, guessed_drain_s: float = 5.0) -> None:
        self._guessed_start_s = guessed_start_s
        self._guessed_drain_s = guessed_drain_s
        self._starts: dict[str, deque[float]] = {pool.value: deque(maxlen=_NUM_LATEST) for pool in Pool}
        self._drains: dict[str, deque[float]] = {pool.value: deque(maxlen=_NUM_LATEST) for pool in Pool}

    def note_start(self, role: ProcessRole, seconds: float) -> None:
        """A worker was in use that long after it was asked for."""
        self._starts[role.value].append(seconds)

    def note_drain(self, role: ProcessRole, seconds: float) -> None:
        """A worker was gone that long after it was told to go."""
        self._drains[role.value].append(seconds)

    @property
    def startup_s(self) -> Mapping[Pool, float]:
        """Median times from asked for to in use."""
        return {pool: median(self._starts[pool.value] or [self._guessed_start_s]) for pool in Pool}

    @property
    def drain_s(self) -> Mapping[Pool, float]:
        """Median times from told to go to gone."""
        return {pool: median(self._drains[pool.value] or [self._guessed_drain_s]) for pool in Pool}
