"""Routing policies on hand-made fleets."""

from collections.abc import Mapping

import pytest

from common.errors import Refused
from common.ids import RequestId, WorkerId
from router.placement.plans import FleetView, Plan, PlanKind, RouteRequest, WorkerLoad
from router.placement.policies import Policy, make_policy

NAMES = ["prefix_affinity", "round_robin", "least_load"]


def worker(name: str, *, free: int = 1000, blocks: int = 1000, sequences: int = 0, queued: int = 0) -> WorkerLoad:
    return WorkerLoad(
        worker_id=WorkerId(name),
        num_blocks=blocks,
        num_free_blocks=free,
        num_sequences=sequences,
        num_pending_prefill_tokens=queued,
    )


def fleet(*workers: WorkerLoad, num_prefill: int | None = None) -> FleetView:
    prefill = tuple(each for each in workers if each.worker_id.startswith("p"))
    return FleetView(
        prefill=prefill,
        decode=tuple(each for each in workers if each.worker_id.startswith("d")),
        num_prefill=len(prefill) if num_prefill is None else num_prefill,
    )


def request(num_tokens: int = 160, *, cached: Mapping[str, int] | None = None, need: int = 11) -> RouteRequest:
    return RouteRequest(
        request_id=RequestId("req"),
        num_tokens=num_tokens,
        block_size=16,
        num_decode_blocks=need,
        cached_blocks={WorkerId(name): count for name, count in (cached or {}).items()},
    )


def policy(name: str = "prefix_affinity", *, local: int = 32) -> Policy:
    return make_policy(name, local_prefill_max_tokens=local)


def choose(policy: Policy, request: RouteRequest, fleet: FleetView) -> Plan:
    plan = policy.choose(request, fleet)
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize("name", NAMES)
def test_policy_without_decode_worker_refuses(name: str) -> None:
    refusal = policy(name).choose(request(), fleet(worker("p0")))
    assert isinstance(refusal, Refused)
    assert "no decode worker is available" in refusal.reason


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("free", "fits"), [(10, False), (11, True)])
def test_policy_chooses_only_decode_workers_with_enough_free_pages(name: str, free: int, fits: bool) -> None:
    plan = policy(name).choose(request(need=11), fleet(worker("p0"), worker("d0", free=free)))
    assert isinstance(plan, Plan) is fits


@pytest.mark.parametrize("name", NAMES)
def test_policy_without_prefill_pool_plans_local(name: str) -> None:
    plan = choose(policy(name), request(), fleet(worker("d0")))
    assert (plan.kind, plan.prefill) == (PlanKind.LOCAL, None)


@pytest.mark.parametrize("name", NAMES)
def test_policy_with_busy_prefill_pool_refuses_a_long_prompt(name: str) -> None:
    refusal = policy(name).choose(request(), fleet(worker("d0"), num_prefill=1))
    assert isinstance(refusal, Refused)
    assert "prefill" in refusal.reason


@pytest.mark.parametrize("name", NAMES)
def test_policy_when_no_prefill_worker_could_hold_the_prompt_plans_local(name: str) -> None:
    assert choose(policy(name), request(), fleet(worker("p0", blocks=9), worker("d0"))).kind is PlanKind.LOCAL


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_tokens", "kind"), [(160 + 32, PlanKind.LOCAL), (160 + 33, PlanKind.REMOTE)])
def test_policy_at_the_local_threshold(name: str, num_tokens: int, kind: PlanKind) -> None:
    plan = choose(policy(name), request(num_tokens, cached={"d0": 10}), fleet(worker("p0"), worker("d0")))
    assert plan.kind is kind


def test_affinity_follows_a_long_match() -> None:
    plan = choose(policy(), request(cached={"p1": 9}), fleet(worker("p0"), worker("p1", queued=100), worker("d0")))
    assert (plan.prefill, plan.predicted_cached_tokens) == ("p1", 144)


def test_affinity_gives_way_to_a_long_queue() -> None:
    plan = choose(policy(), request(cached={"p1": 9}), fleet(worker("p0"), worker("p1", queued=145), worker("d0")))
    assert plan.prefill == "p0"


def test_affinity_counts_a_one_block_match_as_noise() -> None:
    loaded = fleet(worker("p0"), worker("p1", queued=1), worker("d0"))
    assert choose(policy(), request(cached={"p1": 1}), loaded).prefill == "p0"
    assert choose(policy(), request(cached={"p1": 2}), loaded).prefill == "p1"


def test_affinity_prefers_the_decode_worker_that_holds_the_prefix() -> None:
    plan = choose(
        policy(local=0), request(1600, cached={"d1": 80}, need=101), fleet(worker("p0"), worker("d0"), worker("d1"))
    )
    assert plan.decode == "d1"


def test_affinity_weighs_the_decode_batch_against_the_transfer() -> None:
    # 80 blocks are 1280 tokens: moving them is worth 64 prefill tokens, and a sequence costs 8.
    for sequences, decode in ((7, "d1"), (9, "d0")):
        loaded = fleet(worker("p0"), worker("d0"), worker("d1", sequences=sequences))
        assert choose(policy(local=0), request(1600, cached={"d1": 80}, need=101), loaded).decode == decode


def test_affinity_fully_cached_prompt_still_computes_its_last_token() -> None:
    plan = choose(policy(local=0), request(160, cached={"p0": 10}), fleet(worker("p0"), worker("d0")))
    assert plan.predicted_cached_tokens == 144


@pytest.mark.parametrize("name", NAMES)
def test_policy_of_equal_workers_takes_turns(name: str) -> None:
    equal = fleet(worker("p0"), worker("p1"), worker("d0"), worker("d1"))
    chosen = policy(name)
    plans = [choose(chosen, request(), equal) for _ in range(4)]
    assert sorted(plan.prefill or "" for plan in plans) == ["p0", "p0", "p1", "p1"]
    assert sorted(plan.decode for plan in plans) == ["d0", "d0", "d1", "d1"]


def test_least_load_ignores_the_cache() -> None:
    loaded = fleet(worker("p0", queued=5), worker("p1"), worker("d0", sequences=2), worker("d1", sequences=1))
    plan = choose(policy("least_load"), request(cached={"p0": 9, "d0": 5}), loaded)
    assert (plan.prefill, plan.decode) == ("p1", "d1")
