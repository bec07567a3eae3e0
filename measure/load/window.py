"""The counted part of a run, and whether the system kept up with the load in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from measure.load.estimates import Estimate, Floats, Ints, Resampler
from measure.load.records import Outcome, RequestRecord

_WARM_UP_SHARE = 0.1
_MAX_WARM_UP_S = 60.0
_MIN_COUNTED_SHARE = 0.5  # least share of requests that the default cool-down leaves
_MIN_REQUESTS = 10  # in each third, else growth is unknown
_NUM_MOMENTS = 200  # at which the backlog of a third is sampled
# Calibrated on simulated M/M/c queues (tests/measure/load/test_window.py): at 80 % of capacity fewer than one run
# in fifty is called unsteady, at 130 % nearly all with 300 requests or more are.
_MIN_BACKLOG_GROWTH = 1.5
_MIN_BACKLOG_SHARE = 0.05  # of the requests due between the middles of the two thirds
_MIN_E2E_GROWTH = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The counted part of a run: requests that were due in it count."""

    start_s: float
    """End of the warm-up."""
    end_s: float
    """Due time of the last counted request."""
    rates_end_s: float
    """End of the time that rates are over: `end_s`, or the last answer where answers take longer than the arrivals."""
    num_counted: int
    num_before: int
    num_after: int
    rule: str

    @property
    def duration_s(self) -> float:
        """Time that rates are divided by."""
        return self.rates_end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """Whether the system kept up: the last third of the window compared with the first."""

    is_steady: bool
    backlog_early: float
    """Mean number of open requests (due, not ended) in the first third."""
    backlog_late: float
    e2e_growth: Estimate | None
    """Ratio of the median E2E of the last third to that of the first; None with too few requests."""
    arrival_growth: float
    """Ratio of the arrivals of the last third to those of the first."""


class NothingMeasured(Exception):
    """No request counts."""


def find_window(requests: Sequence[RequestRecord], *, warm_up_s: float | None, cool_down_s: float | None) -> Window:
    """Return the window of a run. Raises NothingMeasured.

    By default the window begins after a tenth of the arrivals, at most a minute, and ends where the last session began:
    later turns meet a system that is emptying. Where most requests are such turns, it ends when half of the sessions
    had: a single one that pauses for hours would make any rate small.
    """
    if not requests:
        raise NothingMeasured("no request was sent")
    due = np.array([request.due_s for request in requests])
    last_s = float(due.max())
    why_end = "the last session began"
    if cool_down_s is None:
        end_s = max((request.due_s for request in requests if request.turn == 0), default=last_s)
        if np.count_nonzero(due <= end_s) < _MIN_COUNTED_SHARE * due.size:
            end_s, why_end = max(end_s, min(last_s, _half_ended_s(requests))), "half of the sessions had ended"
    else:
        end_s, why_end = last_s - cool_down_s, "as asked"
    start_s = min(_MAX_WARM_UP_S, _WARM_UP_SHARE * end_s) if warm_up_s is None else warm_up_s
    num_before, num_after = int(np.count_nonzero(due < start_s)), int(np.count_nonzero(due > end_s))
    num_counted = due.size - num_before - num_after
    if start_s > end_s or num_counted <= 0:
        raise NothingMeasured(
            f"no request was due between {start_s:g} s (warm-up) and {end_s:g} s; requests were due until {last_s:g} s"
        )
    return Window(
        start_s=start_s,
        end_s=end_s,
        rates_end_s=_rates_end(requests, start_s, end_s),
        num_counted=num_counted,
        num_before=num_before,
        num_after=num_after,
        rule=_rule(warm_up_s, window=(start_s, end_s), why_end=why_end if num_after or cool_down_s else ""),
    )


def counted(requests: Sequence[RequestRecord], window: Window) -> tuple[RequestRecord, ...]:
    """Return the requests that count, in the order in which they were due."""
    inside = (request for request in requests if window.start_s <= request.due_s <= window.end_s)
    return tuple(sorted(inside, key=lambda request: (request.due_s, request.session, request.turn)))


def _rates_end(requests: Sequence[RequestRecord], start_s: float, end_s: float) -> float:
    """Return the window's end, or the last answer where the window is shorter than half of the answers."""
    inside = [request for request in requests if start_s <= request.due_s <= end_s]
    median_s = float(np.median([request.e2e_s for request in inside]))
    return end_s if end_s - start_s >= median_s else max(request.end_s for request in inside)


def _half_ended_s(requests: Sequence[RequestRecord]) -> float:
    """Return the last time at which at least half as many sessions ran as ever did at once."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for each in requests:
        begins[each.session] = min(each.due_s, begins.get(each.session, each.due_s))
        ends[each.session] = max(each.end_s, ends.get(each.session, each.end_s))
    ended = np.sort(list(ends.values()))
    running = np.searchsorted(np.sort(list(begins.values())), ended, "right") - np.arange(ended.size)
    return float(ended[2 * running >= running.max()].max())


def _rule(warm_up_s: float | None, *, window: tuple[float, float], why_end: str) -> str:
    start_s, end_s = window
    why_start = f"a tenth of the arrivals, at most {_MAX_WARM_UP_S:g} s" if warm_up_s is None else "as asked"
    parts = [f"due from {start_s:.1f} s ({why_start})"]
    if why_end:
        parts.append(f"to {end_s:.1f} s ({why_end})")
    return " ".join(parts)


def steadiness(requests: Sequence[RequestRecord], *, start_s: float, end_s: float) -> Steadiness:
    """Compare the last third of the time from `start_s` to `end_s` with its first.

    A run is not steady when open requests grew (by a half, by a twentieth of the arrivals in between, and by the square
    root of those) and answers certainly take longer: either alone may be chance. Refused requests have no latency.
    """
    third_s = (end_s - start_s) / 3
    due = np.array([request.due_s for request in requests])
    early, late = (_third(requests, start, start + third_s) for start in (start_s, end_s - third_s))
    backlogs = [
        float(num_open(requests, np.linspace(start, start + third_s, _NUM_MOMENTS)).mean())
        for start in (start_s, end_s - third_s)
    ]
    num_between = np.count_nonzero((due > start_s + third_s / 2) & (due <= end_s - third_s / 2))
    growth = _growth(early, late)
    grown = backlogs[1] > _MIN_BACKLOG_GROWTH * backlogs[0] and (
        backlogs[1] - backlogs[0] > max(_MIN_BACKLOG_SHARE * num_between, math.sqrt(num_between))
    )
    return Steadiness(
        is_steady=not (grown and growth is not None and growth.low > _MIN_E2E_GROWTH),
        backlog_early=backlogs[0],
        backlog_late=backlogs[1],
        e2e_growth=growth,
        arrival_growth=len(late) / len(early) if early else 1.0,
    )


def _third(requests: Sequence[RequestRecord], start_s: float, end_s: float) -> list[RequestRecord]:
    return [request for request in requests if start_s <= request.due_s <= end_s]


def num_open(requests: Sequence[RequestRecord], moments_s: Floats) -> Ints:
    """Return the number of open requests (due, not ended) at each moment."""
    due = np.sort([request.due_s for request in requests])
    ends = np.sort([request.end_s for request in requests])
    return np.searchsorted(due, moments_s, "right") - np.searchsorted(ends, moments_s, "right")


def _growth(early: Sequence[RequestRecord], late: Sequence[RequestRecord]) -> Estimate | None:
    """Return the ratio of median latencies; None with too few requests."""
    medians = []
    for seed, requests in enumerate((early, late)):
        e2e_s = np.array([request.e2e_s for request in requests if request.outcome is not Outcome.REFUSED])
        if e2e_s.size < _MIN_REQUESTS:
            return None
        resampler = Resampler(e2e_s.size, seed=seed)
        medians.append(resampler.quantiles(e2e_s, np.arange(e2e_s.size), (0.5,))[:, 0])
    return Estimate.of(medians[1] / np.maximum(medians[0], 1e-9))
