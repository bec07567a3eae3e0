"""Detects load above capacity, where every figure depends on the length of the run."""

import math
from collections.abc import Sequence

import numpy as np

from measure.load.estimates import Estimate, Floats, Resampler
from measure.load.records import Outcome, RequestRecord
from measure.load.summary import Steadiness

_MIN_REQUESTS = 10  # in each third, else growth is unknown
_NUM_MOMENTS = 200  # at which the backlog of a third is sampled
# Calibrated on simulated M/M/c queues (tests/measure/load/test_steadiness.py): at 80 % of capacity fewer than one run
# in fifty is called unsteady, at 130 % nearly all with 300 requests or more are.
_MIN_BACKLOG_GROWTH = 1.5
_MIN_BACKLOG_SHARE = 0.05  # of the requests due between the middles of the two thirds
_MIN_E2E_GROWTH = 1.1


def steadiness(requests: Sequence[RequestRecord], *, start_s: float, end_s: float) -> Steadiness:
    """Compare the last third of the time from `start_s` to `end_s` with its first.

    A run is not steady when open requests grew (by a half, by a twentieth of the arrivals in between, and by the square
    root of those) and answers certainly take longer: either alone may be chance. Refused requests have no latency.
    """
    third_s = (end_s - start_s) / 3
    due = np.array([request.due_s for request in requests])
    ends = np.sort([request.end_s for request in requests])
    early, late = (_third(requests, start, start + third_s) for start in (start_s, end_s - third_s))
    backlogs = [_backlog(np.sort(due), ends, start, start + third_s) for start in (start_s, end_s - third_s)]
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


def _backlog(due: Floats, ends: Floats, start_s: float, end_s: float) -> float:
    """Return the mean number of open requests (due, not ended). Both arrays are sorted."""
    moments = np.linspace(start_s, end_s, _NUM_MOMENTS)
    return float(np.mean(np.searchsorted(due, moments, "right") - np.searchsorted(ends, moments, "right")))


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
