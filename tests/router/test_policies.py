"""Properties of every routing policy, those for replays alone included."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from common.config import RouterConfig
from common.errors import Refused
from common.timing import LinkModel
from common.wire_names import PlanKind
from measure.simulate.policies.registry import REPLAY_POLICIES, SIMULATED_POLICIES
from router.placement.answer_pool import AnswerPool
from router.placement.loads import ProjectedLoad
from router.placement.plans import FleetView, PlacementRequest, Plan
from router.placement.policies.registry import POLICIES
from tests.router.fleets import TIMING, choose, fleet, policy, prefill_fleet, request, worker

NAMES = sorted(REPLAY_POLICIES)
OWN_THRESHOLD = {"llm_d"}
"""Policies whose published rule decides about local prefills."""
JOINT = {"greedy_perfect_signals"}
"""Policies that compare local plans with all others, without a threshold."""
UNEXPLAINED = {"predictive"}
LINKED = replace(TIMING, links={None: LinkModel(latency_s=0.001, bytes_per_s=1e9)})


def test_configuration_accepts_exactly_the_policies_that_need_no_simulation() -> None:
    assert sorted(get_args(RouterConfig.model_fields["policy"].annotation)) == sorted(POLICIES)
    assert not POLICIES.keys() & SIMULATED_POLICIES.keys()


def test_docs_say_how_every_configurable_policy_chooses() -> None:
    assert policies_in("serving.md", "| `router.policy` | chooses |") == {*POLICIES}


def test_docs_say_how_every_policy_for_replays_alone_chooses() -> None:
    assert policies_in("simulation.md", "| policy for replays | chooses |") == {*SIMULATED_POLICIES}


def policies_in(document: str, head: str) -> set[str]:
    """Return the policies that a table of a document names."""
    page = (Path(__file__).parents[2] / "docs" / document).read_text("utf-8")
    table = page.partition(head)[2].partition("\n\n")[0]
    return {name for name in re.findall(r"`(\w+)`", table) if name in REPLAY_POLICIES}


@pytest.mark.parametrize("name", NAMES)
def test_policy_without_decode_worker_refuses(name: str) -> None:
    refusal = policy(name).choose(request(), fleet(worker("p0")))
    assert isinstance(refusal, Refused)
    assert "no decode worker is available" in refusal.reason


@pytest.mark.parametrize("name", NAMES)
def test_policy_plans_an_embedding_on_a_worker_of_the_prefill_pool_or_refuses(name: str) -> None:
    wanted = request(pool=AnswerPool.PREFILL, num_output_tokens=0)
    plan = choose(policy(name), wanted, prefill_fleet(worker("p0"), worker("p1")))
    assert (plan.answering in {"p0", "p1"}, plan.prefill) == (True, None)
    refusal = policy(name).choose(wanted, prefill_fleet())
    assert isinstance(refusal, Refused)
    assert "no prefill worker is available" in refusal.reason


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("free", "fits"), [(10, False), (11, True)])
def test_policy_chooses_only_decode_workers_with_enough_free_pages(name: str, free: int, fits: bool) -> None:
    plan = policy(name).choose(request(), fleet(worker("p0"), worker("d0", free=free)))
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


@pytest.mark.parametrize("name", sorted(set(NAMES) - OWN_THRESHOLD - JOINT))
@pytest.mark.parametrize(("num_tokens", "kind"), [(160 + 32, PlanKind.LOCAL), (160 + 33, PlanKind.REMOTE)])
def test_policy_at_the_local_threshold(name: str, num_tokens: int, kind: PlanKind) -> None:
    chosen = policy(name, local_prefill_max_tokens=32)
    assert choose(chosen, request(num_tokens, cached={"d0": 10}), fleet(worker("p0"), worker("d0"))).kind is kind


@pytest.mark.parametrize("name", sorted(set(NAMES) - JOINT))
@pytest.mark.parametrize("cached", [{}, {"p0": 10}])
def test_policy_with_one_worker_per_pool_takes_them(name: str, cached: dict[str, int]) -> None:
    plan = choose(policy(name), request(cached=cached), fleet(worker("p0"), worker("d0")))
    assert (plan.prefill, plan.answering) == ("p0", "d0")


@pytest.mark.parametrize("name", NAMES)
def test_policy_of_a_fully_cached_prompt_predicts_all_but_its_last_block(name: str) -> None:
    plan = choose(policy(name), request(160, cached={"d0": 10}), fleet(worker("d0")))
    assert plan.predicted_cached_tokens == 144


@pytest.mark.parametrize("name", sorted(set(NAMES) - UNEXPLAINED))
def test_policy_explains_its_choice_before_the_others(name: str) -> None:
    view = fleet(worker("p0"), worker("p1"), worker("d0"), worker("d1"))
    plan = choose(policy(name), request(cached={"p1": 5, "d1": 5}), view)
    candidates = plan.candidates()
    assert (candidates[0].prefill, candidates[0].answering) == (plan.prefill, plan.answering)
    assert len(set(map(repr, candidates))) == len(candidates) <= plan.num_candidates


def test_answers_wait_for_the_pages_that_they_and_others_will_grow_into() -> None:
    wanted = request(160, num_samples=2, num_output_tokens=32)  # 12 pages now, 4 more at the end
    chosen = policy("least_load")

    def choice(**fields: Any) -> Plan | Refused:
        return chosen.choose(wanted, fleet(worker("d0", **fields)))

    assert isinstance(choice(free=16, num_decodes=1), Plan)
    assert isinstance(choice(free=15, num_decodes=1), Refused)
    assert isinstance(choice(free=18, num_decodes=1, num_growth_blocks=2.5), Refused)
    assert isinstance(choice(free=19, num_decodes=1, num_growth_blocks=2.5), Plan)
    # A worker without answers has nothing to wait for.
    assert isinstance(choice(free=12), Plan)


loads = st.builds(
    lambda used, blocks, counts, tokens: {
        "blocks": blocks,
        "free": max(blocks - used, 0),
        "num_sequences": counts[0],
        "num_waiting": counts[1],
        "num_decodes": counts[2],
        "num_active_requests": counts[3],
        "num_active_prefills": counts[4],
        "num_pending_prefill_tokens": tokens,
        "num_active_missing_tokens": tokens,
        "num_active_blocks": used,
        "num_growth_blocks": used / 8,
        "num_context_tokens": tokens,
        "prefill_free_at_s": tokens / 1000,
    },
    st.integers(0, 400),
    st.integers(0, 400),
    st.tuples(*[st.integers(0, 100)] * 5),
    st.integers(0, 5000),
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[PlacementRequest, FleetView]:
    names = [f"p{i}" for i in range(draw(st.integers(0, 4)))] + [f"d{i}" for i in range(draw(st.integers(0, 4)))]
    workers = [worker(name, timing=LINKED, **draw(loads)) for name in names]
    cached = draw(st.dictionaries(st.sampled_from([*names, "gone"]), st.integers(1, 60)))
    num_tokens = draw(st.integers(1, 200) | st.integers(1, 5000))
    slo = {"tpot_slo_s": draw(st.sampled_from([0.02, 0.1])), "ttft_slo_s": draw(st.sampled_from([0.1, 10.0]))}
    absent = draw(st.integers(0, 1))
    num_prefill = sum(name.startswith("p") for name in names) + absent
    return request(num_tokens, cached=cached, **slo), fleet(*workers, num_prefill=num_prefill, block_bytes=1000)


@settings(max_examples=60)
@given(situations=st.lists(situations(), min_size=1, max_size=3))
def test_every_policy_chooses_workers_of_the_view_with_room_or_refuses(
    situations: list[tuple[PlacementRequest, FleetView]],
) -> None:
    for name in NAMES:
        note(name)
        chosen = policy(name, local_prefill_max_tokens=16)
        for wanted, view in situations:
            check_choice(chosen.choose(wanted, view), wanted, view)


def check_choice(plan: Plan | Refused, wanted: PlacementRequest, view: FleetView) -> None:
    if isinstance(plan, Refused):
        assert plan.reason
        assert plan.retry_after_s > 0
        assert "for a token" in plan.reason or not _has_room(wanted, view)
        return
    assert plan.answering in {each.worker_id for each in view.decode if _fits(wanted, each)}
    assert (plan.prefill is None) == (plan.kind is PlanKind.LOCAL)
    if plan.prefill is not None:
        prefill = next(each for each in view.prefill if each.worker_id == plan.prefill)
        assert prefill.num_blocks >= wanted.num_prefill_blocks
    assert 0 <= plan.predicted_cached_tokens < wanted.num_tokens
    assert len(plan.candidates()) <= 16
    if plan.pull is not None:
        assert plan.pull.source in view.sources - {plan.computes}


def _fits(wanted: PlacementRequest, worker: ProjectedLoad) -> bool:
    num_grown = wanted.num_growth_blocks + worker.num_growth_blocks if worker.num_decodes else 0
    return worker.num_free_blocks >= wanted.num_decode_blocks + num_grown


def _has_room(wanted: PlacementRequest, view: FleetView) -> bool:
    """Return whether every policy must find a plan."""
    could_prefill = any(each.num_blocks >= wanted.num_prefill_blocks for each in view.prefill)
    return any(_fits(wanted, each) for each in view.decode) and (could_prefill or not view.num_prefill)
