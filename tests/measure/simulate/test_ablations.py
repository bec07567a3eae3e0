"""Rows of a comparison that show what the line's order and shedding bring to `predictive`."""

from pathlib import Path

from common.slo import Slo
from measure.simulate.ablations import ABLATIONS, ArrivalQueue
from measure.simulate.comparison import PolicyComparison, ReplaySettings
from router.line.tenant_queue import rank

SMALL = Path(__file__).parents[2] / "data" / "small.jsonl"


def test_without_order_no_short_or_urgent_request_overtakes_an_earlier_one() -> None:
    queue = ArrivalQueue[str]()
    queue.add_tenant("t", weight=1.0)
    for number, (name, priority, work_s, due_s) in enumerate(
        [("long and late", 0, 9.0, 1.0), ("short", 0, 0.1, 50.0), ("urgent", 0, 5.0, 11.0), ("important", 1, 9.0, 90.0)]
    ):
        key = rank(priority=priority, work_s=work_s, due_s=due_s, number=number)
        queue.push(name, tenant="t", rank=key, due_s=due_s, work_s=work_s)

    places = [queue.pop(now_s=10.0) for _ in range(4)]

    assert [place and place.item for place in places] == ["important", "long and late", "short", "urgent"]


def test_ablations_are_rows_beside_the_whole_router(tmp_path: Path) -> None:
    comparison = PolicyComparison(
        settings=ReplaySettings(
            trace=SMALL,
            num_requests=40,
            num_prefill=1,
            num_decode=1,
            max_step_tokens=8192,
            slo=Slo(ttft_s=2.0, tpot_s=0.05),
            shed="slo",
        ),
        policies=("predictive", *ABLATIONS),
        speeds=(20.0,),
        out=tmp_path,
    )
    comparison.prepare()
    figures = {each.cell.policy: each.summary.figures for each in comparison.run(num_jobs=1, report=lambda _: None)}

    refused = {policy: figure.num_not_complete > 0 for policy, figure in figures.items()}
    assert refused == {
        "predictive": True,
        "predictive_without_shedding": False,
        "predictive_without_order": True,
        "predictive_placement_alone": False,
    }
    assert len({figure.num_good for figure in figures.values()}) > 1
