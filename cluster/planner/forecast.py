"""Forecasts the arrival rate from its level and trend.

Counts scatter, the more the burstier the arrivals. So the forecast uses the newest observations, as far back as one
straight line explains all of them within that scatter: the whole memory at a steady load, which gives a precise rate;
only the observations since a jump, which is followed at once. A slope counts if it exceeds twice its standard error
and the line has enough points.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_NUM_SIGMAS = 3.0
"""Standard deviations within which an observation agrees with the line."""
_RELATIVE_SCATTER = 0.03
"""Minimum relative scatter assumed for any rate."""
_MIN_TREND_POINTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    time_s: float
    """Middle of the window."""
    rate: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTrend:
    """Trend of the arrivals: requests a second as a straight line over time."""

    rate: float
    """Present rate."""
    slope: float
    """Change per second; 0.0 if not significant."""
    num_points: int

    def ahead(self, horizon_s: float) -> float:
        """Return the rate after that time, between the present rate and twice that.

        A fall is followed only when it has happened; a line extended too far is meaningless.
        """
        return min(max(self.rate, self.rate + self.slope * horizon_s), 2.0 * self.rate)


class ArrivalForecast:
    """Remembers arrival rates."""

    def __init__(self, *, memory_s: float) -> None:
        self._memory_s = memory_s
        self._points: deque[_Point] = deque()

    def add(self, now_s: float, *, num_arrived: int, window_s: float, burstiness: float) -> None:
        """Add the arrivals in the window that ends now. `window_s` is positive; times only grow."""
        rate = num_arrived / window_s
        scatter = burstiness * max(1, num_arrived) / window_s**2 + (_RELATIVE_SCATTER * rate) ** 2
        self._points.append(_Point(time_s=now_s - window_s / 2, rate=rate, variance=scatter))
        while self._points[-1].time_s - self._points[0].time_s > self._memory_s:
            self._points.popleft()

    def trend(self, now_s: float) -> RateTrend:
        """Return the longest line that the newest observations agree with. Call after `add`."""
        points = list(self._points)
        best = _fit(points[-1:], now_s)
        num_tried = 2
        while num_tried <= len(points) and (fitted := _fit(points[-num_tried:], now_s)) is not None:
            best = fitted
            num_tried += 1
        assert best is not None, "one point fits itself"
        return best


def _fit(points: Sequence[_Point], now_s: float) -> RateTrend | None:
    """Return the least-squares line; None if a point does not agree with it.

    All points have equal weight: weights by count would bias the line towards counts that are small by chance.
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
    return RateTrend(rate=max(0.0, rate_now), slope=slope, num_points=num_points)
