"""Routers of a replay that lack a part of `predictive`, or know everything at once."""

from common.config import RouterConfig
from measure.simulate.routers import ABLATIONS, ArrivalQueue, routers_of
from tests.measure.simulate.builders import make_settings
from tests.router.queues import Item, push


def test_without_order_no_short_or_urgent_request_overtakes_an_earlier_one() -> None:
    queue = ArrivalQueue[Item]()
    queue.add_tenant("t", weight=1.0)
    push(queue, 0, tenant="t", work_s=9.0, due_s=1.0)
    push(queue, 1, tenant="t", work_s=0.1, due_s=50.0)
    push(queue, 2, tenant="t", work_s=5.0, due_s=11.0)
    push(queue, 3, tenant="t", priority=1, work_s=9.0, due_s=90.0)

    places = [queue.pop(now_s=10.0) for _ in range(4)]

    assert [place and place.item for place in places] == [3, 0, 1, 2]


def test_parts_of_a_router_are_replaced_by_the_name_of_its_policy() -> None:
    settings = make_settings(router=RouterConfig(shed="slo"), event_lag_s=1.0)
    replaced = {name: routers_of(name).replacing(settings) for name in (*ABLATIONS, "greedy_perfect_signals", "dynamo")}
    assert {name for name, found in replaced.items() if found.router.shed == "none"} == {
        "predictive_without_shedding",
        "predictive_placement_alone",
    }
    assert {name for name, found in replaced.items() if found.substitutes.queue is ArrivalQueue} == {
        "predictive_without_order",
        "predictive_placement_alone",
    }
    assert {name for name, found in replaced.items() if not found.event_lag_s} == {"greedy_perfect_signals"}
