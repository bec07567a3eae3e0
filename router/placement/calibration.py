"""Intervals for predicted durations, learned from how earlier predictions came out.

A timing model predicts a duration; errors of durations are relative, so what is learned is the logarithm of actual /
predicted. The latest WINDOW outcomes give its median, which corrects the prediction, and the two quantiles that bound
the interval. Outcomes drift with the load, so the levels of these quantiles adapt as well: a bound that too many
outcomes cross moves outwards, one that too few cross moves inwards (adaptive conformal inference: Gibbs and Candès,
NeurIPS 2021). For any distribution of the errors, also a changing one, the share of outcomes beyond each bound then
tends to (1 - COVERAGE) / 2.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

COVERAGE = 0.8
"""Share of the outcomes that intervals should hold."""
WINDOW = 200
MIN_OUTCOMES = 20
"""Outcomes before which there is no correction and no interval."""
_MISS = (1 - COVERAGE) / 2
_ADAPTATION = 0.005
"""Change of a bound's level by one outcome beyond it, as in the paper."""
_LEVELS = (0.01, 0.3)
"""Range of the share of the window's outcomes that is left beyond a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationForecast:
    """A predicted duration; most outcomes lie in its interval."""

    expected_s: float
    """Median."""
    low_s: float | None = None
    """Bounds of the interval that should hold COVERAGE of the outcomes; None before enough outcomes are known."""
    high_s: float | None = None
    passed_s: float = 0.0
    """Part of the duration that had passed when the forecast was made, and so is certain."""
    predicted_s: float
    """Prediction of the rest, before any correction."""


class ErrorBand:
    """The errors of one kind of prediction. Every operation takes constant time."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._below = self._above = _MISS

    def forecast(self, predicted_s: float, *, passed_s: float = 0.0) -> DurationForecast:
        """Return a duration of which `passed_s` has passed and `predicted_s` is predicted, corrected and bounded."""
        if len(self._latest) < MIN_OUTCOMES:
            return DurationForecast(expected_s=passed_s + predicted_s, passed_s=passed_s, predicted_s=predicted_s)
        return DurationForecast(
            expected_s=passed_s + predicted_s * self.factor(0.5),
            low_s=passed_s + predicted_s * self.factor(self._below),
            high_s=passed_s + predicted_s * self.factor(1 - self._above),
            passed_s=passed_s,
            predicted_s=predicted_s,
        )

    def learn(self, forecast: DurationForecast, actual_s: float) -> None:
        """Adjust later forecasts by the actual time of one."""
        rest_s = actual_s - forecast.passed_s
        if rest_s <= 0 or forecast.predicted_s <= 0:
            return
        if forecast.low_s is not None and forecast.high_s is not None:
            self._below = _adapt(self._below, is_missed=actual_s < forecast.low_s)
            self._above = _adapt(self._above, is_missed=actual_s > forecast.high_s)
        error = math.log(rest_s / forecast.predicted_s)
        self._latest.append(error)
        insort(self._sorted, error)
        if len(self._latest) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def factor(self, level: float) -> float:
        """Return the quantile of actual / predicted, between the two nearest outcomes; 1 before enough are known."""
        if len(self._latest) < MIN_OUTCOMES:
            return 1.0
        position = level * (len(self._sorted) - 1)
        index = min(int(position), len(self._sorted) - 2)
        low, high = self._sorted[index : index + 2]
        return math.exp(low + (position - index) * (high - low))


def _adapt(level: float, *, is_missed: bool) -> float:
    least, most = _LEVELS
    return min(max(level + _ADAPTATION * (_MISS - is_missed), least), most)
