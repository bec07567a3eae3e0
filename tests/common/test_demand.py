from dataclasses import replace

import pytest

from common.demand import Demand, RequestShape, demand_from_proto, demand_to_proto, merge_demands


def make_demand(num_arrived: int, *, num_finished: int, num_shapes: int, size: int, window_s: float = 10.0) -> Demand:
    shape = RequestShape(num_prompt_tokens=size, num_computed_tokens=size // 2, num_output_tokens=3)
    return Demand(
        window_s=window_s,
        num_arrived=num_arrived,
        num_refused=1,
        num_finished=num_finished,
        num_good=num_finished - 1,
        shapes=(shape,) * num_shapes,
        num_queued=2,
        num_queued_tokens=200,
        ttft_p90_s=size / 100,
        tpot_p90_s=None,
        burstiness=2.0,
    )


def test_demand_survives_the_wire() -> None:
    demand = make_demand(20, num_finished=18, num_shapes=4, size=100)
    assert demand_from_proto(demand_to_proto(demand)) == demand


@pytest.mark.parametrize("field", ["window_s", "burstiness", "ttft_p90_s"])
def test_impossible_demand_is_refused_by_field(field: str) -> None:
    message = demand_to_proto(make_demand(20, num_finished=18, num_shapes=4, size=100))
    setattr(message, field, float("nan"))
    with pytest.raises(ValueError, match=f"demand.{field} is nan"):
        demand_from_proto(message)


def test_merged_demand_adds_counts_and_keeps_the_sample_uniform() -> None:
    busy = make_demand(300, num_finished=300, num_shapes=128, size=100)
    quiet = make_demand(100, num_finished=100, num_shapes=100, size=200)
    both = merge_demands([busy, quiet])
    assert (both.num_arrived, both.num_finished, both.num_good, both.num_queued_tokens) == (400, 400, 398, 400)
    sizes = [shape.num_prompt_tokens for shape in both.shapes]
    assert sizes.count(100) == 128
    assert sizes.count(200) == 43
    assert (both.ttft_p90_s, both.tpot_p90_s) == (2.0, None)


def test_router_younger_than_the_window_counts_at_its_pace() -> None:
    old = make_demand(100, num_finished=100, num_shapes=10, size=100)
    young = make_demand(20, num_finished=20, num_shapes=2, size=100, window_s=2.0)
    assert merge_demands([old, young]).num_arrived == 200


def test_merged_demand_of_idle_routers_is_empty() -> None:
    empty = replace(make_demand(0, num_finished=0, num_shapes=0, size=1, window_s=0.0), ttft_p90_s=None)
    both = merge_demands([empty, empty])
    assert (both.window_s, both.num_arrived, both.shapes, both.burstiness) == (0.0, 0, (), 1.0)
