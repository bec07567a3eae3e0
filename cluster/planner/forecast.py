"""How many requests will come: level and trend of the arrival rate, looked ahead by the time that a worker needs.

Counts scatter by chance, the more the burstier the arrivals. So the newest observations are taken, as far back as one
straight line explains them all within that scatter: at a steady load that is the whole memory, and the rate is known
well; after a jump only what came since, and it is followed at once. A slope counts when it is larger than twice its
standard error, and the line is long enough to tell.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_NUM_SIGMAS = 3.0
"""Of scatter within which an observation agrees with the line."""
_RELATIVE_SCATTER = 0.03
"""That no rate goes below, however many requests it counts."""
_MIN_TREND_POINTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    time_s: float
    """The middle of the window."""
    rate: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Requests a second over time."""

    rate: float
    """Now."""
    slope: float
    """Change in each second; 0.0: none that chance would not explain."""
    num_points: int

    def ahead(self, horizon_s: float) -> float:
        """Return the rate after a time: never below the present one, never more than twice it.

        A fall is believed when it has come; a line that is drawn on for long ends in nonsense.
        """
        return min(max(self.rate, self.rate + self.slope * horizon_s), 2.0 * self.rate)


class Forecast:
    """Remembers arrival rates."""

    def __init__(self, *, memory_s: float) -> None:
        self._memory_s = memory_s
        self._points: deque[_Point] = deque()

    def add(self, now_s: float, *, num_arrived: int, window_s: float, burstiness: float) -> None:
        """Note what arrived in the window that ends now. `window_s` is positive; times only grow."""
        rate = num_arrived / window_s
        scatter = burstiness * max(1, num_arrived) / window_s**2 + (_RELATIVE_SCATTER * rate) ** 2
        self._points.append(_Point(time_s=now_s - window_s / 2, rate=rate, variance=scatter))
        while self._points[-1].time_s - self._points[0].time_s > self._memory_s:
            self._points.popleft()

    def line(self, now_s: float) -> Line:
        """Return what the newest observations agree on. Call after `add`."""
        points = list(self._points)
        best = _fit(points[-1:], now_s)
        num_tried = 2
        while num_tried <= len(points) and (fitted := _fit(points[-num_tried:], now_s)) is not None:
            best = fitted
            num_tried += 1
        assert best is not None, "one point fits itself"
        return best


def _fit(points: Sequence[_Point], now_s: float) -> Line | None:
    """Return the least-squares line; None when a point does not agree with it.

    All points weigh the same: weights by their counts would pull the line to those that chance made small.
    """
    num_points = len(points)
    mean_time = sum(point.time_s for point in points) / num_points
    mean_rate = sum(point.rate for point in points) / num_points
    variance = sum(point.variance for point in points) / num_points
    spread = sum((point.time_s - mean_time) ** 2 for point in points)
    slope = 0.0
    if num_points >= _MIN_TREND_POINTS and spread > 0.0:
        slope = sum((point.time_s - mean_time) * (point.rate - mean_rate) for point in points) / spread
        if abs(slope) < 2.0 * math.sqrt(variance / spread):
            slope = 0.0
    for point in points:
        expected = mean_rate + slope * (point.time_s - mean_time)
        if abs(point.rate - expected) > _NUM_SIGMAS * math.sqrt(max(variance, point.variance)):
            return None
    rate_now = mean_rate + slope * (now_s - mean_time)
    return Line(rate=max(0.0, rate_now), slope=slope, num_points=num_points)
