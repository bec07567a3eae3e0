"""The page of sessions: curves that can be told apart, with their losses beside them."""

from dataclasses import replace
from typing import Any

from measure.experiment.points import LoadUnit, Point
from measure.experiment.session_page import session_panels, verdict_of
from measure.load.session_figures import SessionFigures
from tests.measure.experiment.builders import make_arm, make_point


def point(name: str, load: float, num_good: int, *, num_complete: int = 10) -> Point:
    sessions = SessionFigures(
        num_sessions=10,
        num_complete=num_complete,
        num_good=num_good,
        stretch_limit=2.0,
        good_per_hour=6.0 * num_good,
        complete_per_hour=60.0,
        completion=None,
        waiting=None,
        stretch=None,
        interactivity_p50=30.0,
        interactivity_p90=20.0 - load if num_complete else None,
    )
    return replace(make_point(make_arm(name=name), load), sessions=sessions, load_unit=LoadUnit.SESSIONS)


def curves(points: list[Point]) -> list[dict[str, Any]]:
    figure: Any = session_panels(points)[0].content
    return [trace.to_plotly_json() for trace in figure.data]


def test_best_arms_have_curves_and_labels_and_the_legend_has_the_others() -> None:
    points = [point(f"arm{number}", load, number % 11) for number in range(12) for load in (4.0, 8.0)]
    drawn = curves(points)
    assert [curve["name"] for curve in drawn][:2] == ["arm10", "arm9"]
    assert [curve.get("visible") for curve in drawn] == [None] * 10 + ["legendonly"] * 2
    assert drawn[0]["text"] == ["4", "8"]
    assert drawn[0]["hovertext"] == [f"{load} sessions at a time: 10 of 10 complete" for load in (4, 8)]
    assert "text" not in drawn[3]
    looks = {(curve["line"]["color"], curve["line"]["dash"], curve["marker"]["symbol"]) for curve in drawn}
    assert len(looks) == 12


def test_points_that_lost_many_sessions_are_marked_and_those_without_any_left_out() -> None:
    points = [point("a", 2.0, 9), point("a", 4.0, 5, num_complete=8), point("a", 8.0, 0, num_complete=0)]
    curve, marks = curves(points)
    assert curve["text"] == ["2", "4"]
    assert marks["name"] == "more than 10 % of the sessions lost"
    assert list(marks["x"]) == [16.0]


def test_verdict_names_the_arm_with_most_good_sessions_and_how_many_equal_it() -> None:
    assert verdict_of([point("a", 2.0, 9), point("b", 2.0, 9), point("c", 2.0, 3)]) == (
        "At 2 sessions at a time, a serves 9 of 10 well, as does one other.",
    )
