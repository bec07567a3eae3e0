"""The order of a comparison's runs, and its table."""

from pathlib import Path

import pytest

from benchmarks.side_by_side.measure import Cell, Plan, cells
from benchmarks.side_by_side.table import figures_of
from common.slo import Slo
from measure.load.measures import summarize
from measure.workload.spec import parse_workload
from tests.measure.load.made_runs import make_request, make_run

STREAM = {"name": "chat", "concurrency": 1, "first_tokens": 8, "output_tokens": 4}
WORKLOAD = parse_workload({"max_requests": 4, "streams": [STREAM]}, source="test")


def test_cells_take_turns_backwards_in_every_other_repeat() -> None:
    plan = Plan(
        arms=("a", "b"),
        workload=WORKLOAD,
        loads=(1.0, 2.0),
        repeats=2,
        warm_up_s=1.0,
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        out=Path(),
    )

    ordered = [(cell.repeat, cell.load, cell.arm) for cell in cells(plan)]

    assert ordered[:4] == [(0, 1.0, "a"), (0, 1.0, "b"), (0, 2.0, "a"), (0, 2.0, "b")]
    assert [arm for _, _, arm in ordered[4:]] == ["b", "a", "b", "a"]


def test_figures_have_a_value_of_each_repeat() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    runs = [
        make_run([make_request(index, due_s=float(index), ttft_s=ttft_s) for index in range(20)])
        for ttft_s in (0.1, 0.3, 0.2)
    ]
    measured = {
        Cell(arm="a", load=1.0, repeat=number): summarize(run, slo=slo, warm_up_s=0.0)
        for number, run in enumerate(runs)
    }

    figures = figures_of(measured).all

    assert figures["1 requests/s", "all", "a", "TTFT p50 ms"].rounds == pytest.approx([100, 300, 200])
    assert figures["1 requests/s", "all", "a", "not complete"].median == 0
