"""The chart of requests: its content, and its buttons."""

from typing import Any

import numpy as np
import pytest

from common.slo import Slo
from measure.load.measures import summarize
from measure.load.report.columns import RequestColumns, columns_of
from measure.load.report.gantt import MAX_ROWS, MIN_ROWS, gantt_panel
from tests.measure.load.synthetic import Shape, make_run

SLO = Slo(ttft_s=1.0, tpot_s=0.05)


def make_columns(shape: Shape) -> RequestColumns:
    run = make_run(shape)
    return columns_of(run, summarize(run, slo=SLO).window)


def trace(figure: Any, name: str) -> Any:
    (found,) = [each for each in figure.data if each.name == name]
    return found


def rows_of(figure: Any) -> set[int]:
    return {int(row) for each in figure.data for row in each.y}


def test_small_run_is_shown_whole_and_bars_are_the_phases() -> None:
    columns = make_columns(Shape(num_requests=30))
    panel = gantt_panel(columns, SLO)
    assert panel.note == "All requests."
    assert len(rows_of(panel.content)) == 30
    queue = trace(panel.content, "queue")
    np.testing.assert_allclose(
        np.asarray(queue.base, dtype=np.float64), [request.sent_s for request in columns.requests], rtol=1e-5
    )
    np.testing.assert_allclose(queue.x, [request.server.queue_s or 0 for request in columns.requests], atol=1e-5)


def test_long_run_is_shown_around_the_longest_wait() -> None:
    columns = make_columns(Shape(num_requests=800))
    figure = gantt_panel(columns, SLO).content
    assert len(rows_of(figure)) == MAX_ROWS
    waits = np.where(columns.is_counted, columns.ttft_s, 0.0)
    slowest = columns.requests[int(np.nanargmax(waits))]
    assert any(f"<b>request {slowest.index}</b>" in text for text in trace(figure, "decode").customdata)


def test_requests_far_apart_fill_few_rows() -> None:
    panel = gantt_panel(make_columns(Shape(num_requests=200, rate=0.01)), SLO)
    assert len(rows_of(panel.content)) == MIN_ROWS
    assert panel.note.startswith(f"{MIN_ROWS} of 200 requests")


@pytest.mark.parametrize("num_prefill", [0, 2])
def test_every_arrangement_has_a_place_for_every_bar_and_mark(num_prefill: int) -> None:
    figure = gantt_panel(make_columns(Shape(num_requests=90, num_prefill=num_prefill)), SLO).content
    (menu,) = figure.layout.updatemenus
    names = [button.label for button in menu.buttons]
    workers = ["by prefill worker", "by decode worker"] if num_prefill else ["by decode worker"]
    assert names == ["by arrival", *workers, "by kind", "side by side, the longest first"]
    for button in menu.buttons:
        moved, _ = button.args
        for place, each in enumerate(figure.data):
            is_bar = each.type == "bar"
            assert len(moved["y"][place]) == len(moved["x"][place]) == len(each.y)
            assert (moved["base"][place] is not None) == is_bar
    first, *_, side_by_side = [button.args[0] for button in menu.buttons]
    for place, each in enumerate(figure.data):
        np.testing.assert_allclose(first["x"][place], each.x, atol=1e-4)
        np.testing.assert_array_equal(first["y"][place], each.y)
    starts = [start for each in side_by_side["base"] if each is not None for start in each]
    assert min(starts) < 0.01


def test_gaps_above_the_objective_are_marked() -> None:
    columns = make_columns(Shape(num_requests=20, num_prefill=0))
    figure = gantt_panel(columns, SLO).content
    marks = trace(figure, "gap above 50 ms")
    expected = sorted(gap for request in columns.requests for gap in request.gaps_s if gap > SLO.tpot_s)
    np.testing.assert_allclose(sorted(marks.customdata), expected, rtol=1e-5)


def test_target_without_time_stamps_is_noted() -> None:
    panel = gantt_panel(make_columns(Shape(num_requests=20, is_silent=True)), SLO)
    assert "reports no time stamps" in panel.note
