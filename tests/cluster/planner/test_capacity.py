import math
from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planner.capacity import Objectives, best_split, rate_of, workers_for
from cluster.planner.decode_capacity import DecodeCapacity, DecodeRoom
from cluster.planner.prefill_capacity import PrefillCapacity, erlang_c, mean_wait_of_waiting_s
from common.demand import RequestShape
from common.slo import Slo
from common.timing import StepModel, TimingModel
from tests.cluster.planner.support import SHAPE, SLO, TIMING

OBJECTIVES = Objectives(slo=SLO, attainment=0.95, max_utilization=0.85)
ROOM = DecodeRoom(num_blocks=20_000, block_size=16)


def prefill_of(
    *shapes: RequestShape, timing: TimingModel = TIMING, objectives: Objectives = OBJECTIVES, burstiness: float = 1.0
) -> PrefillCapacity:
    return PrefillCapacity(timing, shapes, objectives, burstiness=burstiness)


def decode_of(*shapes: RequestShape, room: DecodeRoom = ROOM, objectives: Objectives = OBJECTIVES) -> DecodeCapacity:
    return DecodeCapacity(TIMING, shapes, objectives, room=room)


shapes_strategy = st.lists(
    st.builds(
        lambda prompt, share, output: RequestShape(
            num_prompt_tokens=prompt, num_computed_tokens=int(prompt * share), num_output_tokens=output
        ),
        st.integers(1, 100_000),
        st.floats(0.0, 1.0),
        st.integers(1, 2000),
    ),
    min_size=1,
    max_size=8,
)


def test_prefill_work_of_full_steps_is_what_an_idle_worker_takes() -> None:
    assert prefill_of(SHAPE).mean_work_s == pytest.approx(0.25, rel=0.01)


def test_prefill_work_of_short_prompts_shares_the_constant_of_a_step() -> None:
    short = RequestShape(num_prompt_tokens=32, num_computed_tokens=32, num_output_tokens=1)
    assert prefill_of(short).mean_work_s == pytest.approx(0.01 / 16 + 32 * 1.025e-4)


def test_prefill_of_cached_prompts_costs_nothing_and_needs_one_worker() -> None:
    cached = replace(SHAPE, num_computed_tokens=0)
    assert workers_for(prefill_of(cached), 1000.0) == 1


def test_prefill_with_burstier_arrivals_or_a_wider_spread_of_prompts_carries_less() -> None:
    even = rate_of(prefill_of(SHAPE), 4)
    assert rate_of(prefill_of(SHAPE, burstiness=8.0), 4) < even
    short, long = replace(SHAPE, num_computed_tokens=1), replace(SHAPE, num_computed_tokens=4095)
    assert rate_of(prefill_of(short, long), 4) < even


def test_prefill_pool_carries_more_than_its_workers_alone() -> None:
    capacity = prefill_of(SHAPE, burstiness=4.0)
    assert rate_of(capacity, 8) > 8 * rate_of(capacity, 1)


def test_prefill_of_prompts_beyond_their_objective_is_sized_by_utilization() -> None:
    hopeless = prefill_of(SHAPE, objectives=replace(OBJECTIVES, slo=Slo(ttft_s=0.1, tpot_s=0.03)))
    assert hopeless.reachable == 0.0
    assert rate_of(hopeless, 2) == pytest.approx(2 * 0.85 / 0.25, rel=0.02)


def test_decode_tpot_is_where_littles_law_settles() -> None:
    capacity, rate = decode_of(SHAPE), 4.0
    running = capacity.num_sequences(1, rate)
    tpot_s = capacity.mean_tpot_s(1, rate)
    assert tpot_s == pytest.approx(TIMING.itl_s(1, 0) - 2e-4 + running * (2e-4 + 1e-7 * (2048 + 64)))
    assert running == pytest.approx(rate * 128 * tpot_s)


@pytest.mark.parametrize("rate", [2.0, 8.0, 14.0])
def test_decode_batch_varies_as_the_birth_death_chain_whose_steps_grow_with_it(rate: float) -> None:
    capacity = decode_of(SHAPE)
    step_s, cost_s = TIMING.decode.constant_s, TIMING.itl_s(1, 2048 + 64) - TIMING.decode.constant_s
    likely = [1.0]  # of n sequences: each leaves at 1 / (tokens * step), all share the step
    for num in range(1, 2000):
        likely.append(likely[-1] * rate * 128 * (step_s + cost_s * num) / num)
    total = sum(likely)
    mean = sum(num * each for num, each in enumerate(likely)) / total
    variance = sum((num - mean) ** 2 * each for num, each in enumerate(likely)) / total
    own = 1 + cost_s / step_s  # a sequence that runs alone takes a longer step than an empty one
    running = capacity.num_sequences(1, rate)
    above_mean_s = capacity.high_tpot_s(1, rate) - step_s - running * cost_s
    num_sigmas = NormalDist().inv_cdf(OBJECTIVES.attainment)
    assert running * own == pytest.approx(mean)
    assert (above_mean_s / num_sigmas / cost_s) ** 2 * own == pytest.approx(variance)


@given(shapes=shapes_strategy, num_workers=st.integers(2, 16))
def test_decode_pool_carries_at_least_what_its_workers_do_alone(shapes: list[RequestShape], num_workers: int) -> None:
    capacity = decode_of(*shapes)
    assert rate_of(capacity, num_workers) >= num_workers * rate_of(capacity, 1) * 0.998


def test_decode_carries_what_meets_the_gap_and_no_more() -> None:
    capacity = decode_of(SHAPE)
    rate = rate_of(capacity, 3)
    assert capacity.high_tpot_s(3, rate) == pytest.approx(SLO.tpot_s, rel=0.01)


def test_decode_with_few_pages_is_bound_by_them() -> None:
    capacity = decode_of(SHAPE, room=replace(ROOM, num_blocks=400))
    rate = rate_of(capacity, 2)
    assert rate < rate_of(decode_of(SHAPE), 2)
    assert capacity.kv_share(2, rate) == pytest.approx(0.95, rel=0.01)


def test_decode_with_small_batches_is_bound_by_them() -> None:
    bound = decode_of(SHAPE, room=replace(ROOM, max_running=4))
    assert rate_of(bound, 2) < rate_of(decode_of(SHAPE), 2)


def test_decode_too_slow_for_one_sequence_is_sized_by_utilization() -> None:
    capacity = decode_of(SHAPE, objectives=replace(OBJECTIVES, slo=Slo(ttft_s=1.0, tpot_s=0.005)))
    assert not capacity.is_reachable
    assert rate_of(capacity, 1) > 0.0


@given(shapes=shapes_strategy, rate=st.floats(0.0, 500.0), more=st.floats(0.0, 500.0))
def test_workers_for_grows_with_the_rate_and_carries_it(shapes: list[RequestShape], rate: float, more: float) -> None:
    for capacity in (prefill_of(*shapes), decode_of(*shapes)):
        size = workers_for(capacity, rate)
        assert 1 <= size <= workers_for(capacity, rate + more)
        assert size == 1024 or capacity.holds(size, rate)
        assert size == 1 or not capacity.holds(size - 1, rate)


@given(shapes=shapes_strategy, num_workers=st.integers(1, 30))
def test_rate_of_grows_with_the_pool_and_is_carried(shapes: list[RequestShape], num_workers: int) -> None:
    for capacity in (prefill_of(*shapes), decode_of(*shapes)):
        rate = rate_of(capacity, num_workers)
        assert rate <= rate_of(capacity, num_workers + 1)
        assert rate in (0.0, float("inf")) or capacity.holds(num_workers, rate)


@given(shapes=shapes_strategy, total=st.integers(2, 24))
def test_best_split_carries_as_much_as_any_other(shapes: list[RequestShape], total: int) -> None:
    prefill, decode = prefill_of(*shapes), decode_of(*shapes)

    def carried(num_prefill: int) -> float:
        return min(rate_of(prefill, num_prefill), rate_of(decode, total - num_prefill))

    chosen, rest = best_split(prefill, decode, total, least=(1, 1))
    assert chosen + rest == total
    assert carried(chosen) >= max(carried(each) for each in range(1, total)) * 0.999


def test_timing_without_any_cost_carries_everything() -> None:
    free = TimingModel(prefill=StepModel(constant_s=0.0), decode=StepModel(constant_s=0.0), max_step_tokens=1)
    assert rate_of(prefill_of(SHAPE, timing=free), 1) == float("inf")


@pytest.mark.parametrize("num_helpers", [0.0, 1.0, 2.0])
def test_prefill_helped_by_whole_workers_carries_what_so_many_more_do(num_helpers: float) -> None:
    capacity = prefill_of(SHAPE)
    assert capacity.helped_by(num_helpers).attainment(2, 6.0) == capacity.attainment(2 + int(num_helpers), 6.0)
    assert capacity.helped_by(num_helpers).utilization(2, 6.0) == capacity.utilization(2 + int(num_helpers), 6.0)


def test_prefill_helped_by_a_part_of_a_worker_lies_between() -> None:
    capacity = prefill_of(SHAPE)
    middle = (capacity.attainment(2, 6.0) + capacity.attainment(3, 6.0)) / 2
    assert capacity.helped_by(0.5).attainment(2, 6.0) == pytest.approx(middle)


def test_decode_spares_the_share_of_a_gap_that_is_left_of_the_objective() -> None:
    capacity = decode_of(SHAPE)
    assert capacity.num_spare(3, 0.0) == pytest.approx(3 * (1 - TIMING.decode.constant_s / SLO.tpot_s))
    rate = 12.0
    assert capacity.num_spare(3, rate) == pytest.approx(3 * (1 - capacity.mean_tpot_s(3, rate) / SLO.tpot_s))
    assert capacity.num_spare(3, 1e6) == 0.0


@pytest.mark.parametrize(
    ("num_servers", "load", "expected"),
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.4092), (10, 0.0, 0.0), (3, 3.0, 1.0)],
)
def test_erlang_c_matches_tables(num_servers: int, load: float, expected: float) -> None:
    assert erlang_c(num_servers, load) == pytest.approx(expected, rel=1e-3)


def test_erlang_c_with_a_thousand_servers_stays_a_probability() -> None:
    assert 0.0 < erlang_c(1000, 990.0) < 1.0
    assert erlang_c(1000, 1e-9) == pytest.approx(0.0)


def test_mean_wait_of_one_server_is_pollaczek_and_khinchin() -> None:
    load, scv = 0.8, 3.0
    wait_s = erlang_c(1, load) * mean_wait_of_waiting_s(1, load, mean_service_s=2.0, arrival_scv=1.0, service_scv=scv)
    assert wait_s == pytest.approx(load / (1 - load) * 2.0 * (1 + scv) / 2)


def test_mean_wait_of_saturated_servers_is_infinite() -> None:
    assert mean_wait_of_waiting_s(2, 2.0, mean_service_s=1.0, arrival_scv=1.0, service_scv=1.0) == math.inf
