"""When a pool may change: up soon, down late, never to and fro.

    need to grow    the load expected when a new worker would serve
    need to shrink  the same with some slack on top: the hysteresis

A pool grows to the smallest need of the last two plans: what lasted for one only was a burst. It shrinks to the largest
need of a long time, at least the time that a worker's drain and next start would cost: waiting as long as a mistake
costs is never more than twice as dear as knowing the future (the ski-rental argument; Lin et al., "Dynamic right-sizing
for power-proportional data centers", INFOCOM 2011, has the same for servers).
"""

from collections import deque
from dataclasses import dataclass

_NUM_TO_CONFIRM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Workers of one pool, at one time."""

    time_s: float
    to_grow: int
    to_shrink: int
    """At least `to_grow`."""


class Patience:
    """One pool's needs of late."""

    def __init__(self) -> None:
        self._needs: deque[Need] = deque()

    def add(self, need: Need, *, stable_s: float) -> None:
        """Note the newest need; those that are no longer asked for go. Times only grow."""
        self._needs.append(need)
        while len(self._needs) > _NUM_TO_CONFIRM and self._needs[1].time_s <= need.time_s - stable_s:
            self._needs.popleft()

    @property
    def grown(self) -> int:
        """The size that the pool should have at least: needed by the last plans, all of them. 0: too few to tell."""
        if len(self._needs) < _NUM_TO_CONFIRM:
            return 0
        return min(need.to_grow for need in list(self._needs)[-_NUM_TO_CONFIRM:])

    def shrunk(self, stable_s: float) -> int | None:
        """Return the size that would have been enough for that time; None: it is not known for as long."""
        if not self._needs or self._needs[-1].time_s - self._needs[0].time_s < stable_s:
            return None
        since_s = self._needs[-1].time_s - stable_s
        return max(need.to_shrink for need in self._needs if need.time_s >= since_s)

    @property
    def spare_now(self) -> int:
        """The size that the last plans would have done with: for a worker that the other pool needs."""
        return max(need.to_shrink for need in list(self._needs)[-_NUM_TO_CONFIRM:])
