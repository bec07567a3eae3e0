"""Figures of whole sessions: what a person, or an agent, waits for.

A session's *waiting* is its time from begin to end without the think and tool times on its longest path: the requests
that ended last, each with the answer that it waited for. Its *stretch* is that waiting by the time that an idle server
needs for the same requests. Its *interactivity* is its output tokens by the end-to-end times of all of its requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from measure.figures import Percentiles, percentiles
from measure.load.records import RequestRecord
from measure.load.window import Window

STRETCH = 2.0
"""Stretch within which a session is good, unless another one is asked for."""
_SAME_S = 1e-5
"""Error of times in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """One session, as it went."""

    session: int
    begin_s: float
    end_s: float
    is_complete: bool
    """Whether all of its planned requests came to their ends."""
    waiting_s: float
    idle_s: float | None
    """Time that an idle server needs for the requests of the longest path; None: not known."""
    num_output_tokens: int
    request_s: float
    """End-to-end times of all of its requests."""

    @property
    def stretch(self) -> float | None:
        """Waiting by that of an idle server; None: not known."""
        return self.waiting_s / self.idle_s if self.idle_s else None

    @property
    def interactivity(self) -> float:
        """Output tokens per second of its requests."""
        return self.num_output_tokens / self.request_s if self.request_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """Figures of the sessions that ran in a window, and began before its end."""

    num_sessions: int
    num_complete: int
    num_good: int | None
    """Complete sessions within the stretch; None when idle times are not known."""
    stretch_limit: float
    good_per_hour: float | None
    """Sessions that ended well in the window, whenever they began, per hour; None when idle times are not known."""
    complete_per_hour: float
    completion: Percentiles | None
    """Seconds from begin to end of complete sessions, think and tool times included."""
    waiting: Percentiles | None
    stretch: Percentiles | None
    """Of complete sessions; None without any, or when idle times are not known."""
    interactivity_p50: float | None
    """Output tokens per second that half of the complete sessions reach; None without any."""
    interactivity_p90: float | None
    """What 90 % of them reach."""

    @property
    def lost_share(self) -> float:
        """Sessions that were not complete, of all."""
        return 1 - self.num_complete / self.num_sessions


def with_idle_times(requests: Iterable[RequestRecord], idle: Iterable[RequestRecord]) -> tuple[RequestRecord, ...]:
    """Return requests with the idle times that the same requests of another run took, one session at a time."""
    times = {(each.session, each.turn): each.e2e_s for each in idle if each.is_complete}

    def known(request: RequestRecord) -> RequestRecord:
        if request.place is None:
            return request
        return replace(request, place=replace(request.place, idle_s=times.get((request.session, request.turn))))

    return tuple(map(known, requests))


def session_outcomes(requests: Iterable[RequestRecord]) -> list[SessionOutcome]:
    """Return the sessions of several requests, in order of their begins; single requests are left out."""
    sessions: dict[int, list[RequestRecord]] = {}
    for request in requests:
        if request.place is not None:
            sessions.setdefault(request.session, []).append(request)
    return sorted((_outcome(own) for own in sessions.values()), key=lambda outcome: (outcome.begin_s, outcome.session))


def session_figures(
    requests: Sequence[RequestRecord], window: Window, *, stretch: float = STRETCH
) -> SessionFigures | None:
    """Return the figures of the sessions that ran in a window, under a stretch; None without any."""
    outcomes = session_outcomes(requests)
    counted = [each for each in outcomes if each.begin_s <= window.end_s and each.end_s >= window.start_s]
    if not counted:
        return None
    complete = [each for each in counted if each.is_complete]
    ended = [each for each in outcomes if each.is_complete and window.start_s <= each.end_s <= window.rates_end_s]
    is_known = all(each.stretch is not None for each in (*complete, *ended))
    per_hour = 3600 / window.duration_s if window.duration_s > 0 else 0.0
    rates = [each.interactivity for each in complete]
    p50, p10 = np.quantile(rates, (0.5, 0.1)).tolist() if rates else (None, None)

    def num_good(sessions: Sequence[SessionOutcome]) -> int:
        return sum(each.stretch is not None and each.stretch <= stretch for each in sessions)

    return SessionFigures(
        num_sessions=len(counted),
        num_complete=len(complete),
        num_good=num_good(complete) if is_known else None,
        stretch_limit=stretch,
        good_per_hour=num_good(ended) * per_hour if is_known else None,
        complete_per_hour=len(ended) * per_hour,
        completion=percentiles(each.end_s - each.begin_s for each in complete),
        waiting=percentiles(each.waiting_s for each in complete),
        stretch=percentiles(each.stretch for each in complete),
        interactivity_p50=p50,
        interactivity_p90=p10,
    )


def _outcome(requests: Sequence[RequestRecord]) -> SessionOutcome:
    path = _longest_path(requests)
    idle = [request.place.idle_s for request in path if request.place is not None]
    known = [each for each in idle if each is not None]
    return SessionOutcome(
        session=requests[0].session,
        begin_s=min(_ready_s(request) for request in requests),
        end_s=max(request.end_s for request in requests),
        is_complete=all(request.is_complete for request in requests)
        and requests[0].place is not None
        and len(requests) == requests[0].place.num_turns,
        waiting_s=sum(request.e2e_s for request in path),
        idle_s=sum(known) if len(known) == len(idle) else None,
        num_output_tokens=sum(request.num_output_tokens for request in requests),
        request_s=sum(request.e2e_s for request in requests),
    )


def _ready_s(request: RequestRecord) -> float:
    """Return when the last answer came that a request waited for."""
    return request.due_s - (0.0 if request.place is None else request.place.think_s)


def _longest_path(requests: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the request that ended last, the one whose answer it waited for last, and so on to the first."""
    ordered = sorted(requests, key=lambda request: request.end_s)
    ends = np.array([request.end_s for request in ordered])
    position = len(ordered) - 1
    path = [ordered[position]]
    while True:
        ready_s = _ready_s(path[-1])
        position = int(np.searchsorted(ends[:position], ready_s + _SAME_S)) - 1
        if position < 0 or ends[position] < ready_s - _SAME_S:
            return path
        path.append(ordered[position])
