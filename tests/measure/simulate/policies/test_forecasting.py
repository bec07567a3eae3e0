"""The policies that predict times, `mooncake` and `greedy_perfect_signals`, worked by hand.

Blocks have 16 tokens and the standard request 160. A prompt token takes a millisecond; gaps between tokens are 10 ms
and a millisecond per sequence.
"""

from dataclasses import replace

import pytest

from common.timing import LinkModel
from common.wire_names import PlanKind
from router.placement.plans import FleetView, Plan
from tests.router.fleets import TIMING, choose, costs, fleet, policy, request, worker

# mooncake


LINKED = replace(TIMING, links={None: LinkModel(latency_s=0.01, bytes_per_s=1e6)})


def mooncake_view(*, queued_s: float = 0.0) -> FleetView:
    return fleet(
        worker("p0", timing=LINKED),
        worker("p1", timing=LINKED, prefill_free_at_s=queued_s),
        worker("d0", num_decodes=1),
        worker("d1"),
        block_bytes=1000,
    )


def test_mooncake_goes_to_the_holder_while_its_queue_is_short() -> None:
    # p1: 160 - 128 = 32 tokens, 32 ms. p0 would pull 8 blocks: 10 + 8 + 32 = 50 ms.
    plan = choose(policy("mooncake"), request(cached={"p1": 8}), mooncake_view())
    assert (plan.prefill, plan.answering, plan.pull) == ("p1", "d1", None)
    assert costs(plan) == pytest.approx({"p1": 0.032, "p0": 0.050})


def test_mooncake_pulls_the_prefix_from_a_holder_whose_queue_is_long() -> None:
    wanted = request(cached={"p0": 2, "p1": 8})
    plan = choose(policy("mooncake"), wanted, mooncake_view(queued_s=0.1))
    # p0 pulls 6 blocks: 10 + 6 + 32 = 48 ms, against 100 + 32.
    assert plan.prefill == "p0"
    assert plan.pull is not None
    assert (plan.pull.source, plan.pull.num_blocks, plan.predicted_cached_tokens) == ("p1", 8, 128)
    assert (plan.predicted_ttft_s, plan.predicted_prefill_s) == pytest.approx((0.048, 0.032))


def test_mooncake_does_not_pull_less_than_half_as_much_again() -> None:
    # 9 is not more than 1.5 * 6: p0 computes 64 tokens itself.
    wanted = request(cached={"p0": 6, "p1": 9})
    plan = choose(policy("mooncake"), wanted, mooncake_view(queued_s=0.1))
    assert (plan.prefill, plan.pull) == ("p0", None)
    assert plan.predicted_ttft_s == pytest.approx(0.064)


def test_mooncake_pulls_only_from_sources() -> None:
    view = replace(mooncake_view(queued_s=9.0), sources=frozenset())
    plan = choose(policy("mooncake"), request(cached={"p1": 8}), view)
    assert (plan.prefill, plan.pull) == ("p0", None)


# greedy_perfect_signals


def test_greedy_prefers_an_idle_decode_worker_without_any_queue() -> None:
    view = fleet(worker("p0", prefill_free_at_s=1.0), worker("d0", num_decodes=9), worker("d1"))
    plan = choose(policy("greedy_perfect_signals"), request(), view)
    assert (plan.kind, plan.answering) == (PlanKind.LOCAL, "d1")


def test_greedy_gives_up_a_faster_first_token_that_would_break_the_token_objective() -> None:
    # Local on d0: 10 + 2 = 12 ms, and 160 ms of prefill over 16 tokens, 22 ms. Remote: 12 ms after half a second.
    view = fleet(worker("p0", prefill_free_at_s=0.5), worker("d0", num_decodes=1))
    wanted = request(num_output_tokens=16, tpot_slo_s=0.02)
    assert choose(policy("greedy_perfect_signals"), wanted, view).kind is PlanKind.REMOTE
    assert choose(policy("greedy_perfect_signals"), replace(wanted, tpot_slo_s=0.03), view).kind is PlanKind.LOCAL


def test_greedy_pulls_when_that_is_faster_than_computing() -> None:
    view = fleet(
        worker("p0", timing=LINKED),
        worker("d0", num_decodes=200, free=0),
        worker("d1", num_decodes=99, timing=LINKED),
        block_bytes=1000,
    )
    plan = choose(policy("greedy_perfect_signals"), request(cached={"d0": 9}, tpot_slo_s=0.12), view)
    assert plan.prefill == "p0"
    assert plan.pull is not None
    assert plan.pull.source == "d0"
    assert plan.predicted_ttft_s == pytest.approx(0.01 + 0.009 + 0.016)


def test_greedy_prefers_a_later_first_token_to_delaying_a_large_batch() -> None:
    # Local 160 ms and 160 ms for each of 20 others, at a tenth: 480 ms. Remote after 200 ms: 360 ms.
    view = fleet(worker("p0", prefill_free_at_s=0.2), worker("d0", num_decodes=20))
    assert choose(policy("greedy_perfect_signals"), request(), view).kind is PlanKind.REMOTE
    idle = fleet(worker("p0", prefill_free_at_s=0.2), worker("d0", num_decodes=10))
    assert choose(policy("greedy_perfect_signals"), request(), idle).kind is PlanKind.LOCAL


def test_greedy_misses_one_objective_rather_than_two() -> None:
    # Local, the first token is in time and the gap, 11 ms + 160 ms / 4, is not. Remote, both are late.
    wanted = request(num_output_tokens=4, tpot_slo_s=0.005, ttft_slo_s=0.3)
    view = fleet(worker("p0", prefill_free_at_s=0.2), worker("d0", num_decodes=1))
    assert choose(policy("greedy_perfect_signals"), wanted, view).kind is PlanKind.LOCAL


@pytest.mark.parametrize(("wait_s", "is_planned"), [(0.1, True), (0.11, False)])
def test_greedy_leaves_a_prompt_that_would_wait_long_in_the_line(wait_s: float, is_planned: bool) -> None:
    view = fleet(worker("p0", prefill_free_at_s=wait_s), worker("d0", num_decodes=200))
    plan = policy("greedy_perfect_signals", max_prefill_wait_s=0.1).choose(request(), view)
    assert isinstance(plan, Plan) is is_planned
