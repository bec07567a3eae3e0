"""Decides when a pool may change: grow soon, shrink late, never oscillate.

    need to grow    for the load expected when a new worker would serve
    need to shrink  the same with some slack on top, as hysteresis

A pool grows to the smallest need of the last two plans: a need of one plan only was a burst. It shrinks to the largest
need of a long time, at least the cost of a worker's drain and next start: waiting for as long as a mistake costs is at
most twice as expensive as knowing the future (the ski-rental argument; for servers see Lin et al., "Dynamic
right-sizing for power-proportional data centers", INFOCOM 2011).
"""

from collections import deque
from dataclasses import dataclass

_NUM_TO_CONFIRM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """Workers that one pool needs at one time."""

    time_s: float
    to_grow: int
    to_shrink: int
    """At least `to_grow`."""


class NeedHistory:
    """The recent needs of one pool."""

    def __init__(self) -> None:
        self._needs: deque[PoolNeed] = deque()

    def add(self, need: PoolNeed, *, stable_s: float) -> None:
        """Add the newest need and drop those that are too old. Times only grow."""
        self._needs.append(need)
        while len(self._needs) > _NUM_TO_CONFIRM and self._needs[1].time_s <= need.time_s - stable_s:
            self._needs.popleft()

    @property
    def grown(self) -> int:
        """The smallest need of the last plans; 0 if there are too few."""
        if len(self._needs) < _NUM_TO_CONFIRM:
            return 0
        return min(need.to_grow for need in list(self._needs)[-_NUM_TO_CONFIRM:])

    def shrunk(self, stable_s: float) -> int | None:
        """Return the size that was enough for that time; None if the record is shorter."""
        if not self._needs or self._needs[-1].time_s - self._needs[0].time_s < stable_s:
            return None
        since_s = self._needs[-1].time_s - stable_s
        return max(need.to_shrink for need in self._needs if need.time_s >= since_s)

    @property
    def spare_now(self) -> int:
        """The size that was enough in the last plans, for giving workers to the other pool."""
        return max(need.to_shrink for need in list(self._needs)[-_NUM_TO_CONFIRM:])
