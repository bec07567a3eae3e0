"""The offline replay of eviction policies: hits are counted where they are, and the bound bounds."""

import random
from itertools import count

from benchmarks.eviction import Segmented, hit_rate, policies
from measure.workload.synth import SynthSettings, synthesize


def chats(num_requests: int, *, seed: int) -> list[list[int]]:
    """Return prompts of chats that go on now and then, behind a block that all share."""
    rng, ids = random.Random(seed), count(1)
    open_chats: list[list[int]] = []
    prompts: list[list[int]] = []
    for _ in range(num_requests):
        if not open_chats or rng.random() < 0.6:
            open_chats.append([0])
        chat = rng.choice(open_chats[-20:])
        chat += [next(ids) for _ in range(rng.randint(1, 30 if rng.random() < 0.1 else 4))]
        prompts.append(list(chat))
    return prompts


def test_hit_rate_counts_leading_blocks_on_the_worker_that_holds_most() -> None:
    prompts = [[0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 9, 2]]
    workers = [Segmented(10, 0.0), Segmented(10, 0.0)]
    assert hit_rate(prompts, workers) == (0 + 0 + 3 + 1) / 12
    assert 4 in workers[0]
    assert 3 in workers[1]


def test_every_policy_stays_below_the_clairvoyant_bound_and_keeps_to_its_capacity() -> None:
    prompts = chats(400, seed=1)
    rates = {name: hit_rate(prompts, [make(60), make(60)]) for name, make in policies(prompts).items()}
    bound = rates.pop("clairvoyant")
    assert all(0 < rate <= bound for rate in rates.values()), (rates, bound)
    for make in policies(prompts).values():
        cache = make(60)
        hit_rate(prompts, [cache])
        assert sum(block in cache for block in range(max(map(max, prompts)) + 1)) <= 60


def test_policy_of_the_workers_beats_lru_where_chats_do_not_fit() -> None:
    trace = synthesize(SynthSettings(num_requests=1500))
    prompts = [request.block_ids for request in trace.requests]
    make = policies(prompts)
    ours, lru = (hit_rate(prompts, [make[name](300) for _ in range(2)]) for name in ("kvrelay", "lru"))
    assert ours > 1.1 * lru
