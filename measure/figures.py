"""Figures of a set of requests, measured or simulated: how many were served as promised, and how fast.

Only complete requests have latencies. Refusals, failures, timeouts and cancellations count as not good.

Every percentile of a measurement interpolates linearly between the two nearest values, as numpy does by default.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.slo import ServedOutcome, Slo

ALL = "all"
"""Kind that stands for the requests of all kinds."""


class Request(ServedOutcome, Protocol):
    """A finished request, measured or simulated. Times in seconds."""

    @property
    def kind(self) -> str:
        """Stream of the workload that it belongs to."""

    @property
    def e2e_s(self) -> float | None:
        """Due to end; None without an end."""


_R = TypeVar("_R", bound=Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of a time, in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many requests of a set were served as promised."""

    num_requests: int
    num_complete: int
    num_good: int
    """Complete requests within both objectives."""
    num_ttft_misses: int
    """Complete requests whose first token was late."""
    num_tpot_misses: int
    """Complete requests whose mean gap was too long. A request can miss both objectives."""

    @property
    def num_not_complete(self) -> int:
        """Requests that were refused, failed, timed out or were cancelled."""
        return self.num_requests - self.num_complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures(Counts):
    """Counts and latencies of a set of requests."""

    ttft: Percentiles | None
    """Latencies are those of complete requests; None without any."""
    itl: Percentiles | None
    """Gaps between pieces of the answers, as the caller measured them."""
    tpot: Percentiles | None
    """Mean gap between the tokens of a request."""
    e2e: Percentiles | None

    @property
    def good_share(self) -> float:
        """Good requests of all requests; 0 without any."""
        return self.num_good / self.num_requests if self.num_requests else 0.0


def summarize(requests: Sequence[Request], *, slo: Slo, itl: Percentiles | None = None) -> Figures:
    """Return the figures of `requests` under `slo`; `itl` are the percentiles of their gaps, where those are known."""
    complete = [request for request in requests if request.is_complete]
    return Figures(
        num_requests=len(requests),
        num_complete=len(complete),
        num_good=sum(map(slo.is_good, complete)),
        num_ttft_misses=sum(not slo.meets_ttft(request) for request in complete),
        num_tpot_misses=sum(not slo.meets_tpot(request) for request in complete),
        ttft=percentiles(request.ttft_s for request in complete),
        itl=itl,
        tpot=percentiles(request.tpot_s for request in complete),
        e2e=percentiles(request.e2e_s for request in complete),
    )


def by_kind(requests: Iterable[_R]) -> dict[str, list[_R]]:
    """Return the requests of all kinds under `ALL`, then those of each kind, by name. Order is kept within each."""
    everything = list(requests)
    kinds = sorted({request.kind for request in everything})
    return {ALL: everything} | {kind: [request for request in everything if request.kind == kind] for kind in kinds}


def percentiles(values: Iterable[float | None], counts: Iterable[int] | None = None) -> Percentiles | None:
    """Return the percentiles of the values that are not None; None without any.

    With `counts`, one per value, `values` are ascending and each is repeated by its count (a histogram).
    """
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    shares = (0.5, 0.9, 0.99)
    if counts is None:
        found = np.quantile(known, shares) if known.size else np.full(len(shares), np.nan)
    else:
        found = histogram_quantiles(known, np.fromiter(counts, dtype=np.float64), shares)
    if np.isnan(found).any():
        return None
    p50, p90, p99 = found.tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)


def histogram_quantiles(values: ArrayLike, counts: ArrayLike, shares: Sequence[float]) -> NDArray[np.float64]:
    """Return `np.quantile(np.repeat(values, counts), shares)` for each row of counts, without repeating the values.

    `values` [n], ascending; `counts` [..., n], whole numbers. Returns [..., len(shares)], NaN for a row without values.
    """
    ordered, cumulated = np.asarray(values, dtype=np.float64), np.cumsum(counts, axis=-1)
    if not ordered.size:
        return np.full((*cumulated.shape[:-1], len(shares)), np.nan)
    last = cumulated[..., -1:] - 1
    ranks = np.maximum(np.asarray(shares) * last, 0.0)
    floors = np.floor(ranks)
    below, above = (
        ordered[np.minimum(np.sum(cumulated[..., None, :] <= rank[..., None], axis=-1), ordered.size - 1)]
        for rank in (floors, np.minimum(floors + 1, np.maximum(last, 0.0)))
    )
    return np.asarray(np.where(last < 0, np.nan, below + (ranks - floors) * (above - below)))
