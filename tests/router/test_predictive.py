"""The predictive policy against costs computed by hand.

The fleet's timing: 10 ms a step and 1 ms a prompt token, steps of 1000 tokens; decode steps of 20 ms, 1 ms a sequence.
"""

import math
from dataclasses import replace
from functools import partial

import pytest

from common.errors import Refused
from common.ids import WorkerId
from common.timing import LinkModel, StepModel, TimingModel
from common.wire_names import PlanKind
from router.placement.plans import Busy, FleetView, PlacementRequest, Plan, Policy, Pull, RetainedOn
from tests.router import fleets
from tests.router.fleets import worker

BLOCK = 100
TIMING = TimingModel(
    prefill=StepModel(constant_s=0.010, per_prefill_token_s=0.001),
    decode=StepModel(constant_s=0.020, per_decode_s=0.001),
    max_step_tokens=1000,
    links={None: LinkModel(latency_s=0.001, bytes_per_s=1e9)},
)
BLOCK_BYTES = 1_000_000  # 1 ms to move, 100 ms to compute


load = partial(worker, timing=TIMING)
fleet = partial(fleets.fleet, block_bytes=BLOCK_BYTES)


def request(num_tokens: int, cached: dict[str, int] | None = None, **changes: object) -> PlacementRequest:
    return fleets.request(num_tokens, cached=cached, block_size=BLOCK, **changes)


def policy(**settings: float) -> Policy:
    return fleets.policy("predictive", **{"max_prefill_wait_s": 10.0, **settings})


def choose(asked: PlacementRequest, view: FleetView, **settings: float) -> Plan:
    return fleets.choose(policy(**settings), asked, view)


def test_prompt_goes_where_the_wait_costs_less_than_computing_elsewhere() -> None:
    # Warm p0: 0.01 + 0.2 s, and half of that for others: 0.315. Cold p1: 1.02 + 0.51 (two steps): 1.53.
    cached = {"p0": 8}
    no_pull = LinkModel(latency_s=100.0, bytes_per_s=1e9)
    slow = replace(TIMING, links={None: no_pull})
    for wait_s, expected in ((1.0, "p0"), (1.5, "p1")):
        view = fleet(
            load("p0", prefill_free_at_s=wait_s, timing=slow), load("p1", timing=slow), load("d0", timing=slow)
        )
        assert choose(request(1001, cached), view).prefill == expected, wait_s


def test_prompt_waits_at_the_worker_with_its_prefix_only_while_others_are_free() -> None:
    slow = replace(TIMING, links={None: LinkModel(latency_s=100.0, bytes_per_s=1e9)})
    warm, decode = load("p0", prefill_free_at_s=0.8, timing=slow), load("d0", timing=slow)
    asked = request(1001, {"p0": 8})
    plan = choose(asked, fleet(warm, load("p1", timing=slow), decode), max_prefill_wait_s=0.1)
    assert plan.prefill == "p0"
    assert plan.max_wait_s >= 0.8, "the worker would send it back to the line"
    busy = fleet(warm, load("p1", prefill_free_at_s=0.5, timing=slow), decode)
    assert isinstance(policy(max_prefill_wait_s=0.1).choose(asked, busy), Busy), "nothing orders it any more"
    late = replace(asked, ttft_slo_s=0.5)
    view = fleet(warm, load("p1", timing=slow), decode)
    assert isinstance(policy(max_prefill_wait_s=0.1).choose(late, view), Busy)


def test_prefix_is_pulled_when_moving_it_is_faster_than_computing_it() -> None:
    view = fleet(load("p0", prefill_free_at_s=3.0), load("p1"), load("d0"))
    plan = choose(request(1001, {"p0": 8}), view)
    assert plan.prefill == "p1"
    assert plan.pull == Pull(source=WorkerId("p0"), num_blocks=8)
    assert plan.predicted_cached_tokens == 800
    # 9 ms for 8 blocks, then one step of 201 tokens; 1 ms for the calls.
    assert plan.predicted_ttft_s == pytest.approx(0.009 + 0.211 + 0.001)


def test_decode_worker_that_wrote_the_last_answer_is_a_source_for_the_next_turn() -> None:
    plan = choose(request(1001, {"d0": 9, "p0": 4}), fleet(load("p0"), load("d0"), load("d1", num_decodes=0)))
    assert plan.pull == Pull(source=WorkerId("d0"), num_blocks=9)


def test_blocks_that_are_only_expected_are_not_pulled() -> None:
    asked = request(1001, {"p0": 8}, count_present=lambda _worker: 0)
    assert choose(asked, fleet(load("p0", prefill_free_at_s=3.0), load("p1"), load("d0"))).pull is None


def test_one_cached_block_is_not_worth_a_pull() -> None:
    plan = choose(request(1001, {"p0": 1}), fleet(load("p0", prefill_free_at_s=3.0), load("p1"), load("d0")))
    assert plan.prefill == "p1"
    assert plan.pull is None


def test_decode_worker_with_fewer_sequences_is_chosen() -> None:
    plan = choose(request(500), fleet(load("p0"), load("d0", num_decodes=5), load("d1", num_decodes=4)))
    assert plan.answering == "d1"
    assert plan.predicted_tpot_s == pytest.approx(0.025)


def test_newcomer_avoids_the_batch_whose_gap_objective_it_would_break() -> None:
    # d0 would go from 29 to 30 ms with an objective of 30: all its sequences would be at risk.
    crowded, remote = load("d0", num_decodes=9), load("d1", num_decodes=4, prefill_free_at_s=0.3)
    view = fleet(crowded, remote)
    assert choose(request(50, tpot_slo_s=0.030, ttft_slo_s=1.0), view).answering == "d1"


def test_short_suffix_stays_on_the_decode_worker_that_has_the_rest() -> None:
    view = fleet(load("p0", prefill_free_at_s=2.0), load("d0"))
    plan = choose(request(1001, {"d0": 10, "p0": 10}), view, local_prefill_max_tokens=32)
    assert plan.kind is PlanKind.LOCAL


def test_long_prompt_is_not_computed_on_a_decode_worker_beside_prefill_workers() -> None:
    view = fleet(load("p0", prefill_free_at_s=2.0), load("d0"))
    assert choose(request(1001), view, local_prefill_max_tokens=32).kind is PlanKind.REMOTE


def test_fleet_without_prefill_workers_decodes_where_it_computes() -> None:
    plan = choose(request(1001, {"d1": 9}), fleet(load("d0"), load("d1")))
    assert (plan.kind, plan.answering, plan.prefill) == (PlanKind.LOCAL, "d1", None)


def test_prompt_that_would_wait_too_long_stays_in_line_and_says_when_to_ask_again() -> None:
    view = fleet(load("p0", prefill_free_at_s=3.0), load("p1", prefill_free_at_s=2.0), load("d0"))
    refused = policy(max_prefill_wait_s=0.5).choose(request(1001), view)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == pytest.approx(1.5)


def test_new_prompts_are_kept_on_both_sides_in_turn_and_old_ones_where_they_are() -> None:
    view = fleet(load("p0"), load("d0"))
    ours = policy()
    keepers = []
    for _ in range(4):
        plan = ours.choose(request(1001), view)
        assert isinstance(plan, Plan)
        keepers.append(plan.retained_on)
    assert sorted(retained_on.value for retained_on in keepers) == ["decode", "decode", "prefill", "prefill"]
    assert choose(request(1001, {"d0": 9}), view).retained_on is RetainedOn.DECODE
    assert choose(request(1001, {"p0": 9}), view).retained_on is RetainedOn.PREFILL


def test_candidates_tell_every_term_and_the_chosen_one_first() -> None:
    plan = choose(request(1001, {"p0": 8}), fleet(load("p0"), load("p1"), load("d0"), load("d1", num_decodes=3)))
    candidates = plan.candidates()
    assert len(candidates) == plan.num_candidates == 4
    assert (candidates[0].prefill, candidates[0].answering) == (plan.prefill, plan.answering)
    for candidate in candidates:
        assert sum(candidate.terms.values()) == pytest.approx(candidate.cost)
    assert [c.cost for c in candidates] == sorted(c.cost for c in candidates)


def test_prompt_of_any_length_goes_to_an_idle_decode_worker_rather_than_wait_long() -> None:
    # 1.02 s of computation: 2.04 on d0 with its reserve, 1.53 on p0 and the wait there.
    for wait_s, kind in ((0.4, PlanKind.REMOTE), (0.6, PlanKind.LOCAL)):
        view = fleet(load("p0", prefill_free_at_s=wait_s), load("d0"))
        assert choose(request(1001), view, local_prefill_max_tokens=math.inf).kind is kind, wait_s


def test_prompt_is_not_computed_where_it_would_break_the_gap_objective() -> None:
    # A second for the prompt, over the 100 tokens of an answer there, not the 20 of its own: 10 ms on top of 24 of the
    # batch, which breaks an objective of 30 ms and keeps one of 60 ms.
    view = fleet(load("p0", prefill_free_at_s=1.0), load("d0", num_decodes=3))
    asked = request(1001, num_output_tokens=20, typical_output_tokens=100, ttft_slo_s=10.0)
    assert choose(asked, view, local_prefill_max_tokens=math.inf).kind is PlanKind.LOCAL
    lax = replace(asked, tpot_slo_s=0.060)
    assert choose(lax, view, local_prefill_max_tokens=math.inf).kind is PlanKind.LOCAL
    strict = replace(asked, tpot_slo_s=0.030)
    assert choose(strict, view, local_prefill_max_tokens=math.inf).kind is PlanKind.REMOTE


def test_in_a_large_fleet_the_free_and_the_warm_worker_are_still_found() -> None:
    far = replace(TIMING, links={None: LinkModel(latency_s=100.0, bytes_per_s=1e9)})
    crowd = [load(f"p{i}", prefill_free_at_s=5.0, timing=far) for i in range(100)]
    decodes = [load(f"d{i}", num_decodes=9) for i in range(100)]
    free, idle = load("p-free"), load("d-idle")
    plan = choose(request(1001), fleet(*crowd, free, *decodes, idle))
    assert (plan.prefill, plan.answering) == ("p-free", "d-idle")
    warm = load("p-warm", prefill_free_at_s=5.1, timing=far)
    plan = choose(request(50_001, {"p-warm": 499}), fleet(*crowd, warm, *decodes, idle))
    assert plan.prefill == "p-warm"
