"""The counted part of a run."""

from collections.abc import Sequence

import numpy as np

from measure.load.records import RequestRecord
from measure.load.summary import Window

_WARM_UP_SHARE = 0.1
_MAX_WARM_UP_S = 60.0
_MIN_COUNTED_SHARE = 0.5  # least share of requests that the default cool-down leaves


class NothingMeasured(Exception):
    """No request counts."""


def find_window(requests: Sequence[RequestRecord], *, warm_up_s: float | None, cool_down_s: float | None) -> Window:
    """Return the window of a run. Raises NothingMeasured.

    By default the window begins after a tenth of the arrivals, at most a minute, and ends where the last session began:
    later turns meet a system that is emptying. Where most requests are such turns, all of them count.
    """
    if not requests:
        raise NothingMeasured("no request was sent")
    due = np.array([request.due_s for request in requests])
    last_s = float(due.max())
    if cool_down_s is None:
        end_s = max((request.due_s for request in requests if request.turn == 0), default=last_s)
        if np.count_nonzero(due <= end_s) < _MIN_COUNTED_SHARE * due.size:
            end_s = last_s
    else:
        end_s = last_s - cool_down_s
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
        rule=_rule(warm_up_s, cool_down_s, window=(start_s, end_s), num_after=num_after),
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


def _rule(warm_up_s: float | None, cool_down_s: float | None, *, window: tuple[float, float], num_after: int) -> str:
    start_s, end_s = window
    why_start = f"a tenth of the arrivals, at most {_MAX_WARM_UP_S:g} s" if warm_up_s is None else "as asked"
    parts = [f"due from {start_s:.1f} s ({why_start})"]
    if num_after or cool_down_s:
        parts.append(f"to {end_s:.1f} s ({'the last session began' if cool_down_s is None else 'as asked'})")
    return " ".join(parts)
