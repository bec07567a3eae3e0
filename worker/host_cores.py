"""How many cores of its host a worker has found idle lately: whether another worker beside it would have any."""

import time
from collections import deque
from typing import NamedTuple

import psutil

_WINDOW_S = 60.0
_GAP_S = 10.0


class _Reading(NamedTuple):
    read_s: float
    idle_s: float
    """Idle time of all cores since the host started."""


class HostCores:
    """Reads the host's idle time now and then. Event loop only."""

    def __init__(self) -> None:
        self._readings = deque([_read()])

    def note(self) -> None:
        """Take a reading when the last one is some seconds old: cheap enough for every step."""
        if time.monotonic() - self._readings[-1].read_s >= _GAP_S:
            self._readings.append(_read())
            while len(self._readings) > 1 and self._readings[-1].read_s - self._readings[1].read_s >= _WINDOW_S:
                self._readings.popleft()

    @property
    def num_idle(self) -> float:
        """Cores that were idle in the last minute or a little more, in the mean."""
        self.note()
        first, now = self._readings[0], _read()
        return max(0.0, (now.idle_s - first.idle_s) / max(now.read_s - first.read_s, 1e-3))


def _read() -> _Reading:
    times = psutil.cpu_times()
    return _Reading(time.monotonic(), times.idle + getattr(times, "iowait", 0.0))
