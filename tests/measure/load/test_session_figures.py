"""Figures of whole sessions."""

from typing import Any

import pytest

from measure.load.records import Outcome, RequestRecord, SessionPlace
from measure.load.session_figures import session_figures, session_outcomes
from measure.load.window import Window
from tests.measure.load.made_runs import make_request

WINDOW = Window(start_s=0.0, end_s=3600.0, rates_end_s=3600.0, num_counted=9, num_before=0, num_after=0, rule="all")


def ask(
    turn: int, due_s: float, e2e_s: float, *, think_s: float = 0.0, of: int = 2, session: int = 0, **more: Any
) -> RequestRecord:
    """Return a request of ten tokens, for which an idle server takes two seconds."""
    given: dict[str, Any] = {
        "session": session,
        "turn": turn,
        "end_s": due_s + e2e_s,
        "chunk_s": (due_s + e2e_s,),
        "chunk_tokens": (10,),
        "place": SessionPlace(num_turns=of, think_s=think_s, idle_s=2.0),
    }
    return make_request(turn, due_s=due_s, **(given | more))


def test_waiting_leaves_out_pauses_and_stretch_is_relative_to_an_idle_server() -> None:
    (outcome,) = session_outcomes([ask(0, 5.0, 3.0), ask(1, 18.0, 5.0, think_s=10.0)])
    assert (outcome.begin_s, outcome.end_s) == (5.0, 23.0)
    assert outcome.waiting_s == 8.0
    assert outcome.stretch == 2.0
    assert outcome.interactivity == 20 / 8.0
    assert outcome.is_complete


def test_sub_agents_count_only_where_the_session_waits_for_them() -> None:
    beside = [ask(0, 0.0, 2.0, of=4), ask(1, 3.0, 4.0, think_s=1.0, of=4), ask(2, 4.0, 20.0, think_s=2.0, of=4)]
    (outcome,) = session_outcomes([*beside, ask(3, 25.0, 2.0, think_s=1.0, of=4)])
    assert outcome.waiting_s == 2.0 + 20.0 + 2.0
    assert outcome.stretch == 24.0 / 6.0
    (short,) = session_outcomes([*beside[:2], ask(3, 8.0, 2.0, think_s=1.0, of=4)])
    assert short.waiting_s == 2.0 + 4.0 + 2.0
    assert not short.is_complete


def test_figures_count_good_sessions_by_the_hour_and_speed_that_most_reach() -> None:
    requests = [
        *(ask(0, 10.0 * n, 2.0 * (1 + n), session=n, of=1) for n in range(11)),
        ask(0, 4000.0, 2.0, session=20, of=1),  # begins after the window
        ask(0, 200.0, 1.0, session=21, of=2),  # ended early
        ask(0, -9.0, 2.0, session=22, of=1),  # was over before
    ]
    figures = session_figures(requests, WINDOW, stretch=3.0)
    assert figures is not None
    assert (figures.num_sessions, figures.num_complete, figures.num_good) == (12, 11, 3)
    assert figures.good_per_hour == 3.0
    assert figures.stretch is not None
    assert figures.stretch.p50 == 6.0
    assert figures.lost_share == pytest.approx(1 / 12)
    assert figures.interactivity_p90 == 10 / 20  # of the eleven that came to their ends
    assert figures.interactivity_p50 is not None
    assert figures.interactivity_p90 is not None
    assert figures.interactivity_p50 > figures.interactivity_p90


def test_refused_session_is_not_complete_and_unknown_idle_times_have_no_stretch() -> None:
    place = SessionPlace(num_turns=1, think_s=0.0)
    requests = [
        ask(0, 0.0, 1.0, of=1, place=place),
        ask(0, 1.0, 1.0, of=1, session=1, place=place, outcome=Outcome.REFUSED, chunk_s=(), chunk_tokens=()),
    ]
    figures = session_figures(requests, WINDOW)
    assert figures is not None
    assert (figures.num_complete, figures.num_good, figures.stretch) == (1, None, None)
    assert figures.completion is not None
    assert (figures.interactivity_p90, figures.lost_share) == (10.0, 0.5)


def test_sessions_that_end_in_the_window_count_by_the_hour_whenever_they_began() -> None:
    late = Window(start_s=1.0, end_s=1801.0, rates_end_s=1801.0, num_counted=1, num_before=1, num_after=0, rule="all")
    figures = session_figures([ask(0, 0.0, 2.0, of=1), ask(0, 2.0, 2.0, of=1, session=1)], late)
    assert figures is not None
    assert (figures.num_sessions, figures.good_per_hour, figures.complete_per_hour) == (2, 4.0, 4.0)


def test_run_without_a_complete_session_has_no_interactivity() -> None:
    figures = session_figures([ask(0, 0.0, 1.0, of=1, outcome=Outcome.REFUSED, chunk_s=(), chunk_tokens=())], WINDOW)
    assert figures is not None
    assert (figures.interactivity_p50, figures.interactivity_p90, figures.completion) == (None, None, None)


def test_requests_that_end_within_an_instant_of_each_other_have_a_path() -> None:
    (outcome,) = session_outcomes([ask(0, 0.0, 1.2e-5), ask(1, 5e-6, 4e-6)])
    assert outcome.waiting_s == pytest.approx(1.6e-5)


def test_single_requests_have_no_figures_of_sessions() -> None:
    assert session_figures([make_request()], WINDOW) is None
