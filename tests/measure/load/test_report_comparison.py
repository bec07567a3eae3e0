"""Pages that compare runs."""

from dataclasses import replace
from pathlib import Path

from common.slo import Slo
from measure.load.measures import summarize
from measure.load.records import Run
from measure.load.report.comparison import comparison_page, distinct_names, write_comparison
from measure.load.summary import Summary
from measure.pages.page import Absent, Page, Table, render_page
from tests.measure.load.synthetic import Shape, make_run
from tests.measure.pages.test_page import HOSTILE, check

SLO = Slo(ttft_s=1.0, tpot_s=0.05)


def make_pair(*shapes: Shape) -> list[tuple[Run, Summary]]:
    return [(run, summarize(run, slo=SLO)) for run in map(make_run, shapes)]


def table_of(page: Page) -> Table:
    (table,) = [
        panel.content for section in page.sections for panel in section.panels if isinstance(panel.content, Table)
    ]
    assert isinstance(table, Table)
    return table


def test_page_names_differences_and_their_size() -> None:
    aggregated = Shape(num_requests=300, rate=3, num_prefill=0, name="2 aggregated")
    page = comparison_page(make_pair(aggregated, Shape(num_requests=300, rate=3, num_decode=1, name="1P1D")))
    assert page.title == "1P1D against 2 aggregated"
    (verdict,) = page.verdict
    assert "ITL p99 ×0.3" in verdict
    assert "better" in verdict
    table = table_of(page)
    assert table.columns == ("measure", "kind", "2 aggregated", "1P1D", "1P1D against 2 aggregated")
    assert {row[1] for row in table.rows} == {"all", "chat", "documents"}
    for index, row in enumerate(table.rows):
        assert row[-1].endswith((", better", ", worse")) == (index in table.strong_rows)
    assert any(row[0] == "ITL p99" and row[-1].endswith("better") for row in table.rows)
    assert not any(isinstance(panel.content, Absent) for section in page.sections for panel in section.panels)
    check(render_page(page))


def test_equal_runs_do_not_differ() -> None:
    shape = Shape(num_requests=120)
    page = comparison_page(make_pair(shape, shape, replace(shape, name="third")))
    assert page.title == "3 runs side by side"
    assert page.verdict == (
        "synthetic (2) against synthetic (1): no headline figure differs by more than chance.",
        "third against synthetic (1): no headline figure differs by more than chance.",
    )
    assert not table_of(page).strong_rows


def test_server_without_time_stamps_is_compared_by_client_latencies() -> None:
    page = comparison_page(make_pair(Shape(num_requests=80), Shape(num_requests=80, is_silent=True, name="other")))
    check(render_page(page))
    silent = comparison_page(make_pair(Shape(num_requests=80, is_silent=True), Shape(num_requests=80, is_silent=True)))
    absent = [
        panel.title for section in silent.sections for panel in section.panels if isinstance(panel.content, Absent)
    ]
    assert absent == ["Mean time in each phase"]


def test_names_are_numbered_where_they_are_equal() -> None:
    runs = [make_run(Shape(num_requests=2, name=name)) for name in ("a", "b", "a")]
    assert distinct_names(runs) == ["a (1)", "b", "a (2)"]


def test_hostile_names_stay_names_and_bytes_are_equal(tmp_path: Path) -> None:
    pair = make_pair(Shape(num_requests=40, name=HOSTILE), Shape(num_requests=40, name="b"))
    for name in ("a.html", "b.html"):
        write_comparison(pair, tmp_path / name)
    page = (tmp_path / "a.html").read_text()
    assert page.encode() == (tmp_path / "b.html").read_bytes()
    assert HOSTILE not in page
    check(page)
