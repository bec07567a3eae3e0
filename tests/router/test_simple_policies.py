"""The policies that need no model of a worker, worked by hand.

Blocks have 16 tokens and the standard request 160, so 10 blocks of prompt and 11 pages. Workers have 1000 pages.
"""

from collections import Counter

import pytest

from common.errors import Refused
from tests.router.fleets import choose, costs, decode_chosen, fleet, policy, request, worker

# random, round_robin, power_of_two, least_load


def test_random_reaches_every_worker_and_repeats_with_its_seed() -> None:
    equal = fleet(worker("d0"), worker("d1"), worker("d2"))
    policies = policy("random", seed=7), policy("random", seed=7)
    first, second = ([choose(each, request(), equal).answering for _ in range(60)] for each in policies)
    assert first == second
    assert set(first) == {"d0", "d1", "d2"}


def test_round_robin_takes_each_pool_in_turn() -> None:
    equal = fleet(worker("p0"), worker("p1"), worker("p2"), worker("d0"), worker("d1"))
    chosen = policy("round_robin")
    plans = [choose(chosen, request(cached={"p0": 9}), equal) for _ in range(6)]
    assert [plan.prefill for plan in plans] == ["p0", "p1", "p2"] * 2
    assert [plan.answering for plan in plans] == ["d0", "d1"] * 3


def test_round_robin_without_a_prefill_worker_keeps_its_turn() -> None:
    chosen = policy("round_robin")
    assert isinstance(chosen.choose(request(), fleet(worker("d0"), worker("d1"), num_prefill=1)), Refused)
    assert choose(chosen, request(), fleet(worker("p0"), worker("d0"), worker("d1"))).answering == "d0"


def test_power_of_two_never_takes_the_fullest_and_often_not_the_emptiest() -> None:
    view = fleet(worker("d0", free=900), worker("d1", free=500), worker("d2", free=100))
    chosen = policy("power_of_two", seed=1)
    counts = Counter(str(choose(chosen, request(), view).answering) for _ in range(300))
    # d0 wins two of the three possible draws, d1 the third.
    assert counts["d2"] == 0
    assert 150 < counts["d0"] < 250


def test_least_load_adds_drain_time_and_kv_pressure() -> None:
    # d0: 300 / 2000 = 0.15 s. d1: half of its KV in use, 0.15 * 0.5 / 0.5 = 0.15 s.
    # d2: 200 / 2000 + 0.15 * 0.2 / 0.8 = 0.1375 s.
    plan = choose(
        policy("least_load"),
        request(),
        fleet(
            worker("d0", num_pending_prefill_tokens=300),
            worker("d1", free=500),
            worker("d2", free=800, num_pending_prefill_tokens=200),
        ),
    )
    assert plan.answering == "d2"
    assert costs(plan) == pytest.approx({"d0": 0.15, "d1": 0.15, "d2": 0.1375})


def test_least_load_ignores_the_cache_and_takes_the_first_of_equals() -> None:
    assert decode_chosen("least_load", worker("d0"), worker("d1"), cached={"d1": 9}, times=3) == "d0"


# longest_prefix


@pytest.mark.parametrize(("match", "decode"), [(1, "d0"), (2, "d1")])
def test_longest_prefix_counts_a_match_of_one_block_as_none(match: int, decode: str) -> None:
    assert decode_chosen("longest_prefix", worker("d0"), worker("d1"), cached={"d1": match}) == decode


def test_longest_prefix_follows_the_longest_match_under_any_load() -> None:
    busy = worker("d1", num_active_requests=500, num_pending_prefill_tokens=10_000)
    assert decode_chosen("longest_prefix", worker("d0"), busy, cached={"d0": 4, "d1": 5}, times=9) == "d1"


def test_longest_prefix_without_a_match_takes_turns() -> None:
    assert decode_chosen("longest_prefix", worker("d0"), worker("d1"), times=2) == "d1"
