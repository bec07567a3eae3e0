"""Traces with other rates over time: those of a day, or stages such as a burst or a square wave.

A recording of an hour has no daily pattern, so its clock is warped: it runs fast in busy times and slowly in quiet
ones. Order, lengths, prefixes and bursts stay those of the recording.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from measure.workload.traces import Trace, TraceError

_HOURS = (0, 2, 4, 6, 8, 9, 11, 13, 15, 18, 20, 22, 24)
_RATES = (0.35, 0.22, 0.18, 0.20, 0.60, 0.90, 1.00, 0.88, 0.97, 0.80, 0.72, 0.50, 0.35)
"""Shares of the peak rate, as in chat services on a working day: the morning triples the load within two hours."""
_GRID = 24 * 60 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A day from midnight to midnight, scaled to some length: a quiet night, a fast rise, two peaks, a slow evening."""

    length_s: float

    def rate(self, at_s: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the rate at times of the day, as shares of the peak."""
        return np.interp(np.asarray(at_s, dtype=np.float64) / self.length_s * 24, _HOURS, _RATES)

    def warp(self, shares: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the seconds since midnight at which these shares of the day's requests have come."""
        times = np.linspace(0, self.length_s, _GRID)
        rates = self.rate(times)
        done = np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2)])
        return np.interp(np.asarray(shares, dtype=np.float64), done / done[-1], times)


def repeated(trace: Trace, times: int) -> Trace:
    """Return the trace repeated `times` times, each time with other contents. Raises TraceError."""
    if times < 1:
        raise TraceError(f"{trace.name}: cannot be repeated {times} times")
    num_ids = 1 + max(block_id for request in trace.requests for block_id in request.block_ids)
    gap_s = trace.duration_s * (1 + 1 / len(trace.requests))
    return replace(
        trace,
        requests=tuple(
            replace(
                request,
                arrival_s=request.arrival_s + gap_s * number,
                block_ids=tuple(block_id + num_ids * number for block_id in request.block_ids),
            )
            for number in range(times)
            for request in trace.requests
        ),
    )


def over_a_day(trace: Trace, day: Day) -> Trace:
    """Return the trace with its arrivals spread over a day. Raises TraceError for a trace without duration."""
    if not trace.duration_s > 0:
        raise TraceError(f"{trace.name}: all requests come at once, so it cannot be spread over a day")
    return _arriving_at(trace, day.warp([request.arrival_s / trace.duration_s for request in trace.requests]))


def in_stages(trace: Trace, stages: Sequence[tuple[float, float]]) -> Trace:
    """Return the trace with its arrivals sped up by stages: (seconds, speed), again from the first after the last."""
    lengths_s, speeds = np.array(stages, dtype=np.float64).T
    ends_s = np.concatenate([[0.0], np.cumsum(lengths_s)])
    played_s = np.concatenate([[0.0], np.cumsum(lengths_s * speeds)])
    rounds, rest_s = np.divmod(np.array([request.arrival_s for request in trace.requests]), played_s[-1])
    return _arriving_at(trace, np.asarray(rounds * ends_s[-1] + np.interp(rest_s, played_s, ends_s)))


def _arriving_at(trace: Trace, times_s: npt.NDArray[np.float64]) -> Trace:
    return replace(
        trace,
        requests=tuple(
            replace(request, arrival_s=float(at_s)) for request, at_s in zip(trace.requests, times_s, strict=True)
        ),
    )
