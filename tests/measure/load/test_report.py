"""Pages of load tests: every panel with data, a reason where there is none, small for runs of any length."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.slo import Slo
from measure.load.comparison import RunComparison, compare
from measure.load.measures import summarize
from measure.load.records import Outcome, RequestRecord, Run, ServerReport
from measure.load.report.page import comparison_page, report_page, write_comparison, write_report
from measure.load.report.phases import lengths_of
from measure.pages.page import Absent, Page, Panel, Table, Tone, render_page
from measure.pages.theme import Phase
from tests.measure.load.made_runs import make_request
from tests.measure.load.synthetic import Shape, make_run
from tests.measure.pages.test_page import HOSTILE, check

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
PLOTLY_BYTES = 2_000_000


def page_of(run: Run, slo: Slo = SLO) -> Page:
    return report_page(run, summarize(run, slo=slo))


def panels_of(page: Page) -> dict[str, Panel]:
    panels = [panel for section in page.sections for panel in section.panels]
    assert max(Counter(panel.title for panel in panels).values()) == 1
    return {panel.title: panel for panel in panels}


def left_out(page: Page) -> set[str]:
    return {title for title, panel in panels_of(page).items() if isinstance(panel.content, Absent)}


def make_record(**changes: Any) -> RequestRecord:
    server = ServerReport(queue_s=0.5, prefill_s=0.25, transfer_s=0.3, transfer_exposed_s=0.125)
    return make_request(due_s=1.0, ttft_s=1.0, gaps_s=[0.5, 0.5], **{"server": server} | changes)


def test_page_of_a_run_with_full_reports_leaves_nothing_out() -> None:
    page = page_of(make_run())
    assert left_out(page) == set()
    assert [section.title for section in page.sections] == [
        "Overview", "Latency", "Over time", "Where the time goes", "Pools",
    ]  # fmt: skip
    assert all(panel.look_for for title, panel in panels_of(page).items())
    check(render_page(page))


def test_page_of_a_server_without_reports_says_what_is_missing_and_why() -> None:
    page = page_of(make_run(Shape(num_requests=100, is_silent=True)))
    assert left_out(page) == {
        "Mean time in each phase", "Exposed transfer by prompt length", "Workers", "Cache hits by turn",
    }  # fmt: skip
    text = render_page(page)
    check(text)
    assert "the target does not report its workers" in text


@pytest.mark.parametrize("num_requests", [1, 2, 5])
def test_page_of_a_tiny_run_is_whole(num_requests: int) -> None:
    run = make_run(Shape(num_requests=num_requests))
    check(render_page(report_page(run, summarize(run, slo=SLO, warm_up_s=0.0))))


def test_page_of_a_run_without_answers_is_whole() -> None:
    run = make_run(Shape(num_requests=20, is_silent=True))
    refused = tuple(
        replace(request, chunk_s=(), chunk_tokens=(), outcome=Outcome.REFUSED, error="Overloaded: full")
        for request in run.requests
    )
    page = page_of(replace(run, requests=refused))
    assert {"Time to first token (TTFT)", "TTFT by prompt length", "ITL over time"} <= left_out(page)
    check(render_page(page))
    card = next(card for card in page.cards if card.label == "Not complete")
    assert card.tone is Tone.BAD


def test_aggregated_run_has_no_transfers() -> None:
    assert "Exposed transfer by prompt length" in left_out(page_of(make_run(Shape(num_requests=100, num_prefill=0))))


def test_warnings_of_the_generator_are_on_the_page_once() -> None:
    warning = "The generator was late."
    assert page_of(make_run(Shape(num_requests=40, warnings=(warning, warning)))).warnings.count(warning) == 1


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        run = make_run(Shape(num_requests=100))
        write_report(run, summarize(run, slo=SLO), tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_names_with_tags_stay_names() -> None:
    run = make_run(Shape(num_requests=60))
    requests = tuple(
        replace(
            request,
            kind=HOSTILE,
            error=HOSTILE if request.error else "",
            server=replace(request.server, decode_worker=HOSTILE, transport=HOSTILE),
        )
        for request in run.requests
    )
    samples = tuple(
        replace(
            sample, workers=tuple(replace(worker, worker_id=HOSTILE + worker.role) for worker in sample.workers[:2])
        )
        for sample in run.samples
    )
    info = replace(run.info, name=HOSTILE, model=HOSTILE, target=HOSTILE, labels={HOSTILE: HOSTILE})
    checker = check(render_page(page_of(Run(info=info, requests=requests, samples=samples))))
    assert {name.rstrip("0123456789") for name in checker.scripts} == {"templates", "plotly-gzip", "main", "data-"}
    for name, script in checker.scripts.items():
        if name.startswith("data-"):
            assert "<script" not in json.dumps(json.loads(script))


def test_long_run_of_many_workers_stays_small() -> None:
    run = make_run(Shape(num_requests=3000, rate=40, num_prefill=6, num_decode=10))
    size = len(render_page(page_of(run)))
    assert size < PLOTLY_BYTES + 1_500_000


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0.5, 0.25, 0.25, 0.125, 0.875)),
        ({"server": ServerReport()}, (0.0, 0.0, 1.0, 0.0, 1.0)),
        ({"server": ServerReport(queue_s=0.5, prefill_s=9.0, transfer_exposed_s=9.0)}, (0.5, 0.5, 0.0, 1.0, 0.0)),
        ({"chunk_s": (), "chunk_tokens": (), "end_s": 1.2, "outcome": Outcome.FAILED}, (0.2, 0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_phases_fill_the_time_from_sending_to_end(changes: dict[str, Any], expected: tuple[float, ...]) -> None:
    order = (Phase.QUEUE, Phase.PREFILL, Phase.OTHER, Phase.TRANSFER, Phase.DECODE)
    lengths = lengths_of(make_record(**changes))
    assert tuple(lengths[phase] for phase in order) == pytest.approx(expected)


# Pages that compare runs.


def compared(*shapes: Shape) -> tuple[list[Run], RunComparison]:
    runs = [make_run(shape) for shape in shapes]
    return runs, compare(runs, [summarize(run, slo=SLO) for run in runs])


def table_of(page: Page) -> Table:
    (table,) = [panel.content for panel in panels_of(page).values() if isinstance(panel.content, Table)]
    assert isinstance(table, Table)
    return table


def test_page_names_differences_and_their_size() -> None:
    aggregated = Shape(num_requests=300, rate=3, num_prefill=0, name="2 aggregated")
    page = comparison_page(*compared(aggregated, Shape(num_requests=300, rate=3, num_decode=1, name="1P1D")))
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
    assert left_out(page) == set()
    check(render_page(page))


def test_equal_runs_do_not_differ() -> None:
    shape = Shape(num_requests=60)
    page = comparison_page(*compared(shape, replace(shape, name="second"), replace(shape, name="third")))
    assert page.title == "3 runs side by side"
    assert page.verdict == (
        "second against synthetic: no headline figure differs by more than chance.",
        "third against synthetic: no headline figure differs by more than chance.",
    )
    assert not table_of(page).strong_rows


def test_server_without_time_stamps_is_compared_by_client_latencies() -> None:
    page = comparison_page(*compared(Shape(num_requests=80), Shape(num_requests=80, is_silent=True, name="other")))
    check(render_page(page))
    silent = comparison_page(
        *compared(Shape(num_requests=80, is_silent=True), Shape(num_requests=80, is_silent=True, name="b"))
    )
    assert left_out(silent) == {"Mean time in each phase"}


def test_hostile_names_stay_names_and_bytes_are_equal(tmp_path: Path) -> None:
    pair = compared(Shape(num_requests=40, name=HOSTILE), Shape(num_requests=40, name="b"))
    for name in ("a.html", "b.html"):
        write_comparison(*pair, tmp_path / name)
    page = (tmp_path / "a.html").read_text()
    assert page.encode() == (tmp_path / "b.html").read_bytes()
    assert HOSTILE not in page
    check(page)
