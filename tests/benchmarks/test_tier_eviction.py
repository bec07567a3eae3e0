"""The replay of tiers' eviction policies: what they keep can be read, and hits and their seconds are counted."""

from itertools import pairwise

import pytest

from benchmarks.eviction import Segmented
from benchmarks.tier_eviction import evaluate, policies
from tests.benchmarks.test_eviction import chats


def seconds(depth: int) -> float:
    return 1.0 + depth


def test_hits_save_the_seconds_of_their_depths() -> None:
    prompts = [[1, 2, 3], [1, 2, 4], [5]]
    hits, saved = evaluate(prompts, Segmented(10, 0.0), seconds)
    assert (hits, saved) == (2 / 7, 3 / 13)


def test_every_policy_keeps_parents_and_to_its_capacity_and_below_the_bound() -> None:
    prompts = chats(300, seed=2)
    parents = {block: parent for prompt in prompts for parent, block in pairwise(prompt)}
    rates = {}
    for name, make in policies(prompts, seconds).items():
        cache = make(60)
        rates[name] = evaluate(prompts, cache, seconds)[0]
        held = [block for block in range(max(map(max, prompts)) + 1) if block in cache]
        assert len(held) <= 60
        assert all(parents[block] in cache for block in held if block in parents), name
        everything = evaluate(prompts, make(10_000), seconds)
        assert everything == pytest.approx(evaluate(prompts, Segmented(10_000, 0.0), seconds)), name
    assert len(rates) == 5
    assert max(rates.values()) == rates["clairvoyant"]
