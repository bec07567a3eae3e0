"""The policies of other systems against their formulas, worked by hand.

Blocks have 16 tokens and the standard request 160, so 10 blocks of prompt and 11 pages. Workers have 1000 pages.
"""

from dataclasses import replace

import pytest

from common.ids import RequestId
from common.wire_names import PlanKind
from measure.simulate.policies.affinity import id_in_session
from router.placement.loads import ProjectedLoad
from tests.router.fleets import choose, costs, decode_chosen, fleet, policy, request, worker

# sglang_cache_aware


@pytest.mark.parametrize(("match", "decode"), [(3, "d0"), (4, "d1")])
def test_sglang_follows_a_match_of_more_than_three_tenths(match: int, decode: str) -> None:
    workers = worker("d0"), worker("d1", num_active_requests=5)
    assert decode_chosen("sglang_cache_aware", *workers, cached={"d1": match}) == decode


@pytest.mark.parametrize("name", ["sglang_cache_aware", "sglang_cache_aware_events"])
@pytest.mark.parametrize(
    ("high", "low", "decode"),
    [(64, 0, "d1"), (65, 0, "d0"), (195, 130, "d1"), (196, 130, "d0")],
    ids=["gap at its limit", "gap above", "ratio at its limit", "ratio above"],
)
def test_sglang_when_imbalanced_forgets_affinity(name: str, high: int, low: int, decode: str) -> None:
    workers = worker("d0", num_active_requests=low), worker("d1", num_active_requests=high)
    assert decode_chosen(name, *workers, cached={"d1": 10}) == decode


def test_sglang_events_follow_a_single_block() -> None:
    workers = worker("d0"), worker("d1", num_active_requests=5)
    assert decode_chosen("sglang_cache_aware_events", *workers, cached={"d1": 1}) == "d1"


def test_sglang_events_break_ties_by_load_then_cache_then_the_last() -> None:
    names = "d0", "d1", "d2", "d3"
    loads, cached_blocks = (2, 1, 1, 1), (0, 9, 5, 5)
    workers = [
        worker(name, num_active_requests=load, num_cached_blocks=blocks)
        for name, load, blocks in zip(names, loads, cached_blocks, strict=True)
    ]
    assert decode_chosen("sglang_cache_aware_events", *workers, cached=dict.fromkeys(names, 3)) == "d3"


def test_sglang_disaggregated_pairs_affinity_with_power_of_two() -> None:
    view = fleet(worker("p0"), worker("p1"), worker("d0", free=100), worker("d1", free=900))
    plan = choose(policy("sglang_cache_aware"), request(cached={"p1": 9, "d0": 9}), view)
    assert (plan.prefill, plan.answering) == ("p1", "d1")


# dynamo


def dynamo_workers(pool: str) -> tuple[ProjectedLoad, ProjectedLoad]:
    return (
        worker(f"{pool}0", num_active_missing_tokens=80, num_active_blocks=3),
        worker(f"{pool}1", num_active_missing_tokens=160, num_active_blocks=4),
    )


def test_dynamo_whole_adds_missing_and_active_blocks() -> None:
    # d0: (80 + 160) / 16 - 2 + 3 + 11 = 27; d1: (160 + 160) / 16 - 9 + 4 + 11 = 26.
    plan = choose(policy("dynamo"), request(cached={"d0": 2, "d1": 9}), fleet(*dynamo_workers("d")))
    assert (plan.answering, costs(plan)) == ("d1", {"d0": 27.0, "d1": 26.0})


def test_dynamo_lmetric_multiplies() -> None:
    # d0: 13 * (14 + 1) = 195; d1: 11 * (15 + 1) = 176.
    plan = choose(policy("dynamo_lmetric"), request(cached={"d0": 2, "d1": 9}), fleet(*dynamo_workers("d")))
    assert (plan.answering, costs(plan)) == ("d1", {"d0": 195.0, "d1": 176.0})


# lmetric


def test_lmetric_multiplies_missing_tokens_by_the_batch() -> None:
    # d0: (160 - 32) * 3 = 384; d1: (160 - 128) * 8 = 256; d2: 160 * 1.
    workers = worker("d0", num_active_requests=2), worker("d1", num_active_requests=7), worker("d2")
    plan = choose(policy("lmetric"), request(cached={"d0": 2, "d1": 8}), fleet(*workers))
    assert (plan.answering, costs(plan)) == ("d2", {"d0": 384.0, "d1": 256.0, "d2": 160.0})


def test_lmetric_disaggregated_decodes_where_the_batch_is_smallest() -> None:
    workers = worker("p0"), worker("d0", num_active_requests=2), worker("d1", num_active_requests=1)
    plan = choose(policy("lmetric"), request(cached={"d0": 8}), fleet(*workers))
    assert (plan.prefill, plan.answering) == ("p0", "d1")


# session_affinity


def affine_worker(session: int, *names: str, turn: str = "req-1") -> str:
    asked = replace(request(), request_id=id_in_session(RequestId(turn), session))
    return choose(policy("session_affinity"), asked, fleet(*map(worker, names))).answering


def test_affinity_keeps_a_session_on_its_worker_whatever_the_load_and_the_request() -> None:
    names = [f"d{n}" for n in range(8)]
    chosen = [affine_worker(session, *names) for session in range(400)]
    assert chosen == [affine_worker(session, *names, turn="req-2") for session in range(400)]
    assert all(30 <= chosen.count(name) <= 75 for name in names)


def test_affinity_moves_only_the_sessions_of_a_worker_that_left() -> None:
    names = [f"d{n}" for n in range(8)]
    for session in range(200):
        before = affine_worker(session, *names)
        if before != "d3":
            assert affine_worker(session, *(name for name in names if name != "d3")) == before


@pytest.mark.parametrize("name", ["dynamo", "dynamo_lmetric"])
def test_dynamo_disaggregated_prefill_is_without_active_blocks_and_decode_pure_load(name: str) -> None:
    # p0: 15 - 2 = 13, p1: 20 - 9 = 11 blocks, though p1 has the more active ones; d0: 3 + 11 against d1: 4 + 11.
    view = fleet(*dynamo_workers("p"), *dynamo_workers("d"))
    plan = choose(policy(name), request(cached={"p0": 2, "p1": 9, "d1": 10}), view)
    assert (plan.prefill, plan.answering) == ("p1", "d0")
    assert plan.candidates()[0].cost == pytest.approx(11.0 + 14.0)


def test_dynamo_never_credits_more_than_is_to_compute() -> None:
    # 160 + 0 tokens are 10 blocks; 12 matching ones make 0, not less.
    plan = choose(policy("dynamo"), request(cached={"d0": 12}), fleet(worker("d0")))
    assert costs(plan) == {"d0": 11.0}


def test_dynamo_breaks_ties_by_lot() -> None:
    chosen = policy("dynamo", seed=3)
    equal = fleet(worker("d0"), worker("d1"), worker("d2"))
    assert {choose(chosen, request(), equal).answering for _ in range(40)} == {"d0", "d1", "d2"}


# llm_d


def test_llm_d_weighs_queue_memory_and_prefix() -> None:
    # d0: queue (4-0)/4 = 1, kv 0.2, prefix 0:    2 + 0.4 + 0   = 2.4
    # d1: queue 0,           kv 0.5, prefix 5/10: 0 + 1.0 + 1.5 = 2.5
    # d2: queue (4-3)/4,     kv 0.4, prefix 3/10: 0.5 + 0.8 + 0.9 = 2.2
    view = fleet(
        worker("d0", free=200, num_waiting=0),
        worker("d1", free=500, num_waiting=4),
        worker("d2", free=400, num_waiting=3),
    )
    plan = choose(policy("llm_d"), request(cached={"d1": 5, "d2": 3}), view)
    assert plan.answering == "d1"
    assert costs(plan) == pytest.approx({"d0": -2.4, "d1": -2.5, "d2": -2.2})


def test_llm_d_disaggregated_weighs_queue_and_prefix_alone() -> None:
    # d0: queue 1 + prefix 0 = 1; d1: queue 0 + 2 * 6/10 = 1.2. p0 likewise, in spite of its full memory.
    view = fleet(
        worker("p0", free=0),
        worker("p1", num_waiting=1),
        worker("d0", free=900),
        worker("d1", free=20, num_waiting=1),
    )
    plan = choose(policy("llm_d"), request(cached={"d1": 6, "p1": 4}), view)
    assert (plan.prefill, plan.answering) == ("p0", "d1")


@pytest.mark.parametrize(("num_tokens", "kind"), [(160 + 15, PlanKind.LOCAL), (160 + 16, PlanKind.REMOTE)])
def test_llm_d_decider_disaggregates_from_16_missing_tokens(num_tokens: int, kind: PlanKind) -> None:
    plan = choose(policy("llm_d"), request(num_tokens, cached={"d0": 10}), fleet(worker("p0"), worker("d0")))
    assert plan.kind is kind


# ray_prefix


@pytest.mark.parametrize(("match", "decode"), [(1, "d1"), (0, "d0")])
def test_ray_follows_a_match_of_a_tenth_under_any_load(match: int, decode: str) -> None:
    workers = worker("d0"), worker("d1", num_active_requests=1000)
    assert decode_chosen("ray_prefix", *workers, cached={"d1": match}) == decode


def test_ray_below_a_tenth_takes_the_smallest_tenant_then_the_shortest_queue() -> None:
    chosen = policy("ray_prefix")
    view = fleet(worker("d0", num_active_requests=2), worker("d1", num_active_requests=1))
    long, short = request(320, cached={"d0": 1, "d1": 1}), request(160)
    # Both tenants are empty: the shorter queue. Then d1 has been sent 304 tokens, d0 none; 160; 320.
    sequence = [long, short, short, short, short]
    assert [choose(chosen, each, view).answering for each in sequence] == ["d1", "d0", "d0", "d1", "d0"]


def test_ray_among_equal_matches_takes_the_shortest_queue() -> None:
    workers = worker("d0", num_active_requests=2), worker("d1", num_active_requests=1)
    assert decode_chosen("ray_prefix", *workers, cached={"d0": 5, "d1": 5}) == "d1"


# aibrix


def test_aibrix_takes_the_longest_match_that_is_not_overloaded() -> None:
    # Requests 0, 0, 6: mean 2, deviation sqrt(8) = 2.83. d2 is above 4.83.
    workers = worker("d0"), worker("d1"), worker("d2", num_active_requests=6)
    assert decode_chosen("aibrix", *workers, cached={"d1": 3, "d2": 9}) == "d1"
    assert decode_chosen("aibrix", *workers[:2], worker("d2", num_active_requests=4), cached={"d2": 9}) != "d2"


def test_aibrix_among_equal_matches_takes_the_fewest_requests() -> None:
    workers = worker("d0", num_active_requests=2), worker("d1", num_active_requests=1)
    assert decode_chosen("aibrix", *workers, cached={"d0": 3, "d1": 3}) == "d1"


def test_aibrix_when_imbalanced_matches_only_the_least_busy() -> None:
    # Requests 0, 0, 4, 4, 4, 20: mean 5.33 and 20 > 2 * 6.33. The match of d2, though usual in load, does not count.
    counts = 0, 0, 4, 4, 4, 20
    workers = [worker(f"d{i}", num_active_requests=count) for i, count in enumerate(counts)]
    assert decode_chosen("aibrix", *workers, cached={"d1": 1, "d2": 9}) == "d1"
    balanced = [*workers[:5], worker("d5", num_active_requests=9)]
    assert decode_chosen("aibrix", *balanced, cached={"d1": 1, "d2": 9}) == "d2"


def test_aibrix_prefill_score_weighs_a_percent_as_a_tenth() -> None:
    # p0: 0.1 * 100 + 0/4; p1: 0.1 * 40 + 4/4 = 5; p2: 0.1 * 30 + 3/4 = 3.75.
    view = fleet(worker("p0"), worker("p1", num_active_prefills=4), worker("p2", num_active_prefills=3), worker("d0"))
    plan = choose(policy("aibrix"), request(cached={"p1": 6, "p2": 7}), view)
    # Mean 2.33, deviation 1.70: p1, at 4, is not above 4.03. The idle decode worker costs 1.
    assert plan.prefill == "p2"
    assert costs(plan) == pytest.approx({"p0": 11.0, "p1": 6.0, "p2": 4.75})


@pytest.mark.parametrize(("busy", "prefill"), [(16, "p1"), (17, "p0")])
def test_aibrix_prefill_spread_above_16_sends_to_the_least_busy(busy: int, prefill: str) -> None:
    view = fleet(worker("p0"), worker("p1", num_active_prefills=busy), worker("d0"))
    wanted = request(cached={"p1": 10})
    # With two workers the busier one is exactly a deviation above the mean: never left out.
    assert choose(policy("aibrix"), wanted, view).prefill == prefill


def test_aibrix_decode_score_is_load_and_slowness_over_free_memory() -> None:
    # Throughput: 2 / 12 ms = 166.7, 8 / 18 ms = 444.4 tokens/s.
    # d0: (2/8 + 1 - 0.375) / (1000/1000) = 0.875; d1: (8/8 + 0) / (500/1000) = 2.
    view = fleet(
        worker("p0"),
        worker("d0", num_active_requests=2, num_decodes=2),
        worker("d1", num_active_requests=8, num_decodes=8, free=500),
    )
    plan = choose(policy("aibrix"), request(), view)
    decode_costs = {each.answering: each.cost - 10.0 for each in plan.candidates()}
    assert plan.answering == "d0"
    assert decode_costs == pytest.approx({"d0": 0.875, "d1": 2.0})


@pytest.mark.parametrize(("busy", "decode"), [(15, "d1"), (16, "d0")])
def test_aibrix_decode_spread_of_16_sends_to_the_least_busy(busy: int, decode: str) -> None:
    view = fleet(worker("p0"), worker("d0", free=20), worker("d1", num_active_requests=busy))
    # Without the rule d0, nearly full, scores (0 + 1) / 0.02 and d1 (1 + 1) / 1.
    assert choose(policy("aibrix"), request(), view).answering == decode
