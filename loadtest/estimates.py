"""Numbers with their uncertainty: percentiles, means and shares of requests, with bootstrap intervals.

Requests that stand in the same line are not independent, and the gaps of one answer even less, so neither is resampled
one by one. `Resampler` cuts the requests, in the order in which they were due, into blocks and resamples blocks
(Carlstein 1986; the length n^(1/3) is that of Hall, Horowitz and Jing 1995). What is measured more than once in a
request, such as its gaps, moves with the request. An interval is between the 2.5th and 97.5th percentile of what the
resamples give. It holds for more of the same run; another run on another day may differ by more.

A percentile is an order statistic: the smallest value that at least this share of all values does not exceed.
"""

from dataclasses import dataclass

CONFIDENCE = 0.95
"""Of every interval."""
MIN_BEYOND = 10
"""A percentile is quoted plainly when at least so many requests lie beyond it: p99 takes 1000 requests."""
PERCENTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and its interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Estimate":
        """Return the same in another unit."""
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """What a share `p` of all values does not exceed."""

    p: float
    estimate: Estimate
    num_needed: int
    """So many requests would be needed to quote it plainly, by what this run shows."""
    is_sufficient: bool
    """Whether there were so many."""

    @property
    def value(self) -> float:
        """The percentile itself."""
        return self.estimate.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of one measure, over requests or over what happened in them."""

    num_requests: int
    num_values: int
    """More than requests where one has several, such as gaps."""
    mean: Estimate
    percentiles: tuple[Percentile, ...]
    """For each of `PERCENTILES`."""
    max: float

    def at(self, p: float) -> Percentile:
        """Return one of `PERCENTILES`. Raises KeyError for another one."""
        for percentile in self.percentiles:
            if percentile.p == p:
                return percentile
        raise KeyError(p)

    @property
    def p50(self) -> float:
        """The median."""
        return self.at(0.5).value

    @property
    def p90(self) -> float:
        """Nine of ten are not above."""
        return self.at(0.9).value

    @property
    def p99(self) -> float:
        """One of a hundred is above."""
        return self.at(0.99).value
