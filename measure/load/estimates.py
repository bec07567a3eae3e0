"""Percentiles, means and shares over requests, with bootstrap intervals.

Requests that wait in the same queue are not independent, and the gaps of one answer even less, so neither is resampled
one by one. `Resampler` cuts the requests, in the order in which they were due, into blocks and resamples blocks
(Carlstein 1986; block length n^(1/3) by Hall, Horowitz and Jing 1995). Values that a request has several of, such as
its gaps, move with the request. An interval lies between the 2.5th and the 97.5th percentile of the resamples. It is
about a longer run under the same conditions; a run on another day may differ by more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from measure.figures import histogram_quantiles

CONFIDENCE = 0.95
MIN_BEYOND = 10
"""Requests that must lie beyond a percentile for it to be quoted plainly: p99 takes 1000 requests."""
PERCENTILES = (0.5, 0.9, 0.95, 0.99)
_Z = 1.959964  # of CONFIDENCE, two-sided
_NUM_RESAMPLES = 1000
_MIN_BLOCKS, _MAX_BLOCKS = 20, 512
_MAX_GRID = 2048
_FEW = 5  # with fewer requests an interval spans all values
_ROUNDING = 1e-9  # 0.99 * 1000 is 990, not slightly more

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, resamples: Floats, bounds: tuple[float, float] | None = None) -> "Estimate":
        """Return resample 0 with the percentile interval of the resamples, or with `bounds` where they are given."""
        value = float(resamples[0])
        if bounds is None:
            tail = 100 * (1 - CONFIDENCE) / 2
            low, high = (float(bound) for bound in np.nanpercentile(resamples, [tail, 100 - tail]))
        else:
            low, high = bounds
        return cls(value=value, low=min(low, value), high=max(high, value))

    @classmethod
    def around(cls, value: float, draws: Floats) -> "Estimate":
        """Return a value with the interval that contains 95 % of its draws, which may be infinite, and the value."""
        tail = (1 - CONFIDENCE) / 2
        low, high = (float(bound) for bound in np.quantile(draws, [tail, 1 - tail], method="inverted_cdf"))
        return cls(value=value, low=min(low, value), high=max(high, value))

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate in another unit."""
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """Value that a share `p` of all values does not exceed."""

    p: float
    estimate: Estimate
    num_needed: int
    """Requests needed to quote it plainly, judged by this run."""
    is_sufficient: bool

    @property
    def value(self) -> float:
        """The percentile itself."""
        return self.estimate.value


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDistribution:
    """Distribution of a measure over requests, or over events within them, such as gaps."""

    num_requests: int
    num_values: int
    """Above `num_requests` where a request has several values."""
    mean: Estimate
    percentiles: tuple[Percentile, ...]
    max: float

    def at(self, p: float) -> Percentile:
        """Return the percentile of a share in `PERCENTILES`. Raises KeyError for any other share."""
        for percentile in self.percentiles:
            if percentile.p == p:
                return percentile
        raise KeyError(p)


class Resampler:
    """Block bootstrap over requests, which are numbered in the order in which they were due.

    Resample 0 is the run itself. Resamplers with the same number of requests and seed draw the same blocks, so that
    runs of the same requests can be compared in pairs.
    """

    def __init__(self, num_requests: int, *, seed: int = 0) -> None:
        self.num_requests = num_requests
        length = _block_length(num_requests)
        self._block_of = np.arange(num_requests) // length
        self._num_blocks = -(-num_requests // length)
        drawn = np.random.default_rng(seed).multinomial(
            self._num_blocks, np.full(self._num_blocks, 1 / max(1, self._num_blocks)), size=_NUM_RESAMPLES
        )
        self._counts: Floats = np.vstack([np.ones(self._num_blocks), drawn])

    def quantiles(self, values: Floats, owners: Ints, shares: Sequence[float]) -> Floats:
        """Return percentiles [resamples, shares] of `values`, of which the i-th belongs to request `owners[i]`.

        NaN in resamples without values. Exact in resample 0, and with up to `_MAX_GRID` values in all resamples.
        """
        grid = _grid(np.sort(values))
        bins = np.minimum(np.searchsorted(grid, values), grid.size - 1)
        cells = np.bincount(self._block_of[owners] * grid.size + bins, minlength=self._num_blocks * grid.size)
        found = histogram_quantiles(grid, self._counts @ cells.reshape(self._num_blocks, grid.size), shares)
        found[0] = np.quantile(values, shares)
        return found

    def ratios(self, numerators: Floats, denominators: Floats) -> Floats:
        """Return for each resample the ratio of two sums over its requests; NaN where the denominator is 0."""
        above, below = (
            self._counts @ np.bincount(self._block_of, weights=values, minlength=self._num_blocks)
            for values in (numerators, denominators)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.where(below > 0, above / below, np.nan))

    def distribution(self, values: Floats, owners: Ints) -> MeasuredDistribution | None:
        """Return the distribution of `values`, of which the i-th belongs to request `owners[i]`; None without any."""
        if not values.size:
            return None
        sums = np.bincount(owners, weights=values, minlength=self.num_requests).astype(np.float64)
        numbers = np.bincount(owners, minlength=self.num_requests).astype(np.float64)
        order = np.argsort(values, kind="stable")
        num_owners = int(np.count_nonzero(numbers))
        found = self.quantiles(values, owners, PERCENTILES)
        bounds = (float(values[order[0]]), float(values[order[-1]])) if num_owners < _FEW else None
        percentiles = []
        for column, share in enumerate(PERCENTILES):
            beyond = owners[order[math.floor(share * (values.size - 1) + _ROUNDING) + 1 :]]
            needed = _num_needed(share, num_owners, values.size, beyond)
            percentiles.append(
                Percentile(
                    p=share,
                    estimate=Estimate.of(found[:, column], bounds),
                    num_needed=needed,
                    is_sufficient=num_owners >= needed,
                )
            )
        return MeasuredDistribution(
            num_requests=num_owners,
            num_values=values.size,
            mean=Estimate.of(self.ratios(sums, numbers), bounds),
            percentiles=tuple(percentiles),
            max=float(values[order[-1]]),
        )

    def share(self, is_good: Bools) -> Estimate:
        """Return the share of good requests, with Wilson's interval (1927).

        The interval is for the number of independent requests that would give the variance of the resamples, at most
        the number of requests. At shares of 0 and 1, where resamples do not vary, it is for all requests.
        """
        num_requests = is_good.size
        value = float(np.mean(is_good))
        effective = float(num_requests)
        if 0 < value < 1:
            variance = float(np.nanvar(self.ratios(is_good.astype(np.float64), np.ones(num_requests))[1:]))
            effective = min(effective, value * (1 - value) / variance) if variance > 0 else effective
        return wilson(value, effective)


def wilson(share: float, num_requests: float) -> Estimate:
    """Return a share of so many independent requests with its interval. scipy's takes milliseconds: it tests, too."""
    spread = _Z**2 / num_requests
    center = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread**2 / 4) / (1 + spread)
    return Estimate(value=share, low=min(share, max(0.0, center - half)), high=max(share, min(1.0, center + half)))


def _block_length(num_requests: int) -> int:
    """Return n^(1/3): shorter where that gives too few blocks, longer where it gives too many to be fast."""
    length = min(round(math.cbrt(num_requests)), num_requests // _MIN_BLOCKS)
    return max(1, length, -(-num_requests // _MAX_BLOCKS))


def _grid(ordered: Floats) -> Floats:
    """Return the values among which percentiles of resamples are searched: all, or some, most of them in the tail."""
    if ordered.size <= _MAX_GRID:
        return np.unique(ordered)
    even = np.linspace(0, 1, _MAX_GRID // 2)
    tail = 1 - np.geomspace(0.1, 1 / ordered.size, _MAX_GRID // 2)
    places = np.ceil(np.concatenate([even, tail]) * (ordered.size - 1)).astype(np.int64)
    return np.unique(ordered[places])


def _num_needed(share: float, num_requests: int, num_values: int, beyond: Ints) -> int:
    """Return the number of requests needed to have `MIN_BEYOND` of them beyond a percentile.

    Where requests have several values, the largest may come from few requests; the number is scaled by that.
    """
    if num_values == num_requests:
        return math.ceil(MIN_BEYOND / (1 - share) - _ROUNDING)
    num_beyond = np.unique(beyond).size
    return MIN_BEYOND if num_beyond >= MIN_BEYOND else math.ceil(num_requests * MIN_BEYOND / max(1, num_beyond))
