"""The policy `prefix_affinity` on hand-made fleets."""

import pytest

from router.placement.plans import PlanKind
from router.placement.policies.interface import Policy
from tests.router.fleets import choose, fleet, policy, request, worker


def affinity(*, local: int = 32) -> Policy:
    return policy("prefix_affinity", local_prefill_max_tokens=local)


def test_affinity_follows_a_long_match() -> None:
    plan = choose(
        affinity(),
        request(cached={"p1": 9}),
        fleet(worker("p0"), worker("p1", num_pending_prefill_tokens=100), worker("d0")),
    )
    assert (plan.prefill, plan.predicted_cached_tokens) == ("p1", 144)


def test_affinity_gives_way_to_a_long_queue() -> None:
    plan = choose(
        affinity(),
        request(cached={"p1": 9}),
        fleet(worker("p0"), worker("p1", num_pending_prefill_tokens=145), worker("d0")),
    )
    assert plan.prefill == "p0"


def test_affinity_counts_a_one_block_match_as_noise() -> None:
    loaded = fleet(worker("p0"), worker("p1", num_pending_prefill_tokens=1), worker("d0"))
    assert choose(affinity(), request(cached={"p1": 1}), loaded).prefill == "p0"
    assert choose(affinity(), request(cached={"p1": 2}), loaded).prefill == "p1"


def test_affinity_prefers_the_decode_worker_that_holds_the_prefix() -> None:
    plan = choose(
        affinity(local=0), request(1600, cached={"d1": 80}, need=101), fleet(worker("p0"), worker("d0"), worker("d1"))
    )
    assert plan.decode == "d1"


def test_affinity_weighs_the_decode_batch_against_the_transfer() -> None:
    # 80 blocks are 1280 tokens: moving them is worth 64 prefill tokens, and a sequence costs 8.
    for sequences, decode in ((7, "d1"), (9, "d0")):
        loaded = fleet(worker("p0"), worker("d0"), worker("d1", num_sequences=sequences))
        assert choose(affinity(local=0), request(1600, cached={"d1": 80}, need=101), loaded).decode == decode


def test_affinity_fully_cached_prompt_still_computes_its_last_token() -> None:
    plan = choose(affinity(local=0), request(160, cached={"p0": 10}), fleet(worker("p0"), worker("d0")))
    assert plan.predicted_cached_tokens == 144


def test_affinity_of_equal_workers_takes_turns() -> None:
    equal = fleet(worker("p0"), worker("p1"), worker("d0"), worker("d1"))
    chosen = affinity()
    plans = [choose(chosen, request(), equal) for _ in range(4)]
    assert sorted(plan.prefill or "" for plan in plans) == ["p0", "p0", "p1", "p1"]
    assert sorted(plan.decode for plan in plans) == ["d0", "d0", "d1", "d1"]


@pytest.mark.parametrize(("num_tokens", "kind"), [(160 + 32, PlanKind.LOCAL), (160 + 33, PlanKind.REMOTE)])
def test_affinity_at_the_local_threshold(num_tokens: int, kind: PlanKind) -> None:
    plan = choose(affinity(), request(num_tokens, cached={"d0": 10}), fleet(worker("p0"), worker("d0")))
    assert plan.kind is kind
