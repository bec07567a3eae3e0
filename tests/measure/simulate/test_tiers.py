"""Simulated tiers: what they hold and tell, and how long requests wait for them."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planner.plan import Observation, ScalingPlan
from cluster.planner.tier_hits import tier_hits
from common.config import RouterConfig
from common.ids import BlockHash
from measure.load.records import RequestRecord
from measure.simulate.cluster import run
from measure.simulate.records import Arrival, ClusterShape, Elasticity, TierShape
from measure.simulate.results import count_cached_tokens
from measure.simulate.tiers import SimTierBlocks
from router.line.read_ahead import LineReadAhead
from tests.measure.simulate.builders import MODEL, make_settings, make_shape

FAST = TierShape(num_blocks=10_000, bytes_per_s=1e9)
SLOW = replace(FAST, bytes_per_s=1e3)


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(8, "little") * 2)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.sampled_from(["keep", "touch", "read"]))),
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
)
def test_each_tier_keeps_its_latest_blocks_and_changes_tell_all_of_them(
    steps: list[tuple[list[int], str]], sizes: list[int]
) -> None:
    tiers = SimTierBlocks([TierShape(num_blocks=size, bytes_per_s=1.0 / (idx + 1)) for idx, size in enumerate(sizes)])
    orders: list[list[BlockHash]] = [[] for _ in sizes]
    told: set[BlockHash] = set()
    for numbers, what in steps:
        named = [block(number) for number in dict.fromkeys(numbers)]
        if what == "keep":
            tiers.keep(named)
        elif what == "touch":
            tiers.touch(named)
        for each in reversed(named):
            levels = [idx for idx, order in enumerate(orders) if each in order]
            if what == "read":
                seconds = tiers.read_s(each, 1)
                assert seconds == (levels[0] + 1 if levels else None)
            for idx, (order, size) in enumerate(zip(orders, sizes, strict=True)):
                if what == "touch" and each in order:
                    order.remove(each)
                    order.append(each)
                elif each not in order and (what == "keep" or (what == "read" and levels and idx < levels[0])):
                    order.append(each)
                    del order[:-size]
        for block_hash, is_in in tiers.drain_changes().items():
            (told.add if is_in else told.discard)(block_hash)
        assert told == {each for order in orders for each in order}
        assert {block(number) for number in range(10) if block(number) in tiers} == told
    assert [counts.blocks for counts in tiers.stats().tiers.values()] == list(map(len, orders))


def returning(shape: ClusterShape, num_prompts: int = 6, **settings: Any) -> list[list[RequestRecord]]:
    """Return the requests of two rounds of prompts, which together exceed a worker's pages."""
    tokens = (shape.num_blocks * shape.block_size) // 3
    arrivals = [
        Arrival(at_s=10.0 * (number + 1), prompt=array("I", [number % num_prompts + 1] * tokens), num_output_tokens=2)
        for number in range(2 * num_prompts)
    ]
    requests = run(shape, make_settings(**settings), arrivals).requests
    assert all(each.is_complete for each in requests)
    return [list(requests[:num_prompts]), list(requests[num_prompts:])]


def cached(requests: Sequence[RequestRecord]) -> int:
    return sum(map(count_cached_tokens, requests))


def test_returning_prompt_is_read_from_a_tier_in_the_time_of_its_bytes() -> None:
    shape = make_shape(0, 1)
    without = returning(shape)
    _first, later = returning(replace(shape, tiers=(FAST,)))
    assert cached(without[1]) == 0
    for request in later:
        num_cached = count_cached_tokens(request)
        assert num_cached > 0.9 * request.num_prompt_tokens - shape.block_size
        read_s = num_cached / shape.block_size * shape.block_bytes / FAST.bytes_per_s
        compute_s = MODEL.prefill_s(request.num_prompt_tokens - num_cached, num_cached)
        assert request.ttft_s == pytest.approx(read_s + compute_s + 2 * 0.0005, rel=0.05)


def test_read_that_takes_longer_than_computing_is_given_up() -> None:
    shape = make_shape(0, 1)
    computed, tiered = returning(shape)[1], returning(replace(shape, tiers=(SLOW,)))[1]
    assert cached(tiered) < 0.5 * cached(returning(replace(shape, tiers=(FAST,)))[1])
    for plain, tried in zip(computed, tiered, strict=True):
        assert plain.ttft_s is not None
        assert tried.ttft_s is not None
        assert tried.ttft_s <= plain.ttft_s + 0.25 + 1e-3  # MIN_PULL_S


def test_tier_serves_handoffs_and_pulls_of_other_workers_and_repeats_exactly() -> None:
    shape = replace(make_shape(2, 2), tiers=(FAST,))
    runs = [returning(shape, num_prompts=16) for _ in range(2)]
    assert runs[0] == runs[1]
    assert cached(runs[0][1]) > 0.8 * sum(each.num_prompt_tokens for each in runs[0][1])
    assert cached(returning(make_shape(2, 2), num_prompts=16)[1]) < cached(runs[0][1])


def test_least_recently_used_blocks_leave_a_tier_that_is_too_small() -> None:
    shape = make_shape(0, 1)
    small = replace(shape, tiers=(TierShape(num_blocks=shape.num_blocks // 2, bytes_per_s=1e9),))
    assert cached(returning(small)[1]) == 0
    router = RouterConfig.model_validate({"metrics_port": None, "policy": "round_robin"})
    assert cached(returning(replace(shape, tiers=(FAST,)), router=router)[1]) > 0


class Recording:
    """A planner that changes nothing, and what it saw last."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def plan(self, observed: Observation) -> ScalingPlan:
        self.seen.append(observed)
        return ScalingPlan(sizes=observed.sizes, reason="")


def test_planner_sees_what_requests_read_from_tiers_and_how_full_these_are() -> None:
    planner, shape = Recording(), make_shape(1, 1)
    elasticity = Elasticity(make_planner=lambda: planner, demand_window_s=60.0)
    requests = returning(replace(shape, tiers=(FAST,)), elasticity=elasticity)[1]
    num_read = max(each.num_read_tokens for observed in planner.seen for each in observed.demand.shapes)
    assert 0 < num_read <= max(map(count_cached_tokens, requests))
    tiers = tier_hits(planner.seen[-1])
    assert (tiers.max_blocks, tiers.max_blocks_each) == (2 * FAST.num_blocks, FAST.num_blocks)
    assert 0 < tiers.num_blocks < tiers.max_blocks
    assert tiers.is_measured
    assert tiers.token_bytes == shape.block_bytes / shape.block_size


def test_requests_that_wait_in_line_have_their_blocks_read_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = make_shape(0, 1, num_blocks=2048, max_model_len=16_000)
    shape = replace(shape, tiers=(replace(FAST, bytes_per_s=1e8),))
    prompts = [array("I", [number + 1] * 8000) for number in range(8)]
    first = [Arrival(at_s=9.0 * number, prompt=prompt, num_output_tokens=2) for number, prompt in enumerate(prompts)]
    again = [
        Arrival(at_s=200.0 + 0.2 * number, prompt=prompt + array("I", [99] * 2000), num_output_tokens=2)
        for number, prompt in enumerate(prompts)
    ]

    def sum_of_waits() -> float:
        requests = run(shape, make_settings(), [*first, *again]).requests[len(prompts) :]
        assert cached(requests) == sum(map(len, prompts))
        return sum(each.ttft_s for each in requests if each.ttft_s is not None)

    with_reads_ahead = sum_of_waits()
    monkeypatch.setattr(LineReadAhead, "enter", lambda _self, _wait: None)
    assert with_reads_ahead < sum_of_waits()
