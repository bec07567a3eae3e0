"""A Prometheus histogram that takes many equal values at once: tokens come in runs."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class WeightedHistogram(Collector):
    """Counts values by upper bound. One thread observes; a scrape, on its own, may see the last value half-counted."""

    def __init__(self, name: str, text: str, *, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = [*buckets, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        """Count a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """Yield the one family."""
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        yield HistogramMetricFamily(self._name, self._text, buckets=list(buckets), sum_value=self._sum)
