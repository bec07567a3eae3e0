"""Attempts counted for each life of a worker, and what the controller and `kvrelay status` see of them."""

import pytest

from common.errors import EngineFault, Overloaded
from router.fleet.lives import HALF_LIFE_S, AttemptCounts
from tests.router.fake_worker import answer, pair, trio
from tests.router.fakes import TestCluster, make_request, prompt_of, running_cluster


async def told(cluster: TestCluster, *names: str) -> list[tuple[float, float]]:
    """Return the attempts and failed ones of these workers, as the controller is told them."""
    response = await cluster.use([worker.endpoint for worker in cluster.workers.values()])
    health = {each.worker_id: each for each in response.worker_health}
    assert all(health[name].epoch == cluster.workers[name].epoch for name in names)
    return [(round(health[name].num_attempts), round(health[name].num_failed)) for name in names]


def test_counts_halve_every_minute() -> None:
    counts = AttemptCounts()
    for failed in (1, 0, 1):
        counts.note(now_s=100.0, num_failed=failed)
    assert counts.counts(100.0) == (3.0, 2.0)
    assert counts.counts(100.0 + HALF_LIFE_S) == pytest.approx((1.5, 1.0))
    counts.note(now_s=100.0 + HALF_LIFE_S)
    assert counts.counts(100.0 + 2 * HALF_LIFE_S) == pytest.approx((1.25, 0.5))


async def test_attempt_that_a_worker_fails_counts_against_it_alone() -> None:
    prefill, first, second = trio()
    first.faults["token 2"] = EngineFault("a step failed")
    async with running_cluster(prefill, first, second) as cluster:
        reply = await cluster.generate(make_request(10))
        assert reply.token_ids() == answer(prompt_of(10), 6)
        assert await told(cluster, "d0", "d1") == [(1, 1), (1, 0)]
        views = {view.worker_id: view for view in (await cluster.status()).workers}
        assert round(views["d0"].num_failed_attempts) == 1
        assert views["d1"].num_failed_attempts == 0


async def test_decode_worker_that_fails_before_the_prefill_worker_is_called_counts_alone() -> None:
    prefill, first, second = trio()
    first.faults["reserve"] = EngineFault("no pages can be looked at")
    async with running_cluster(prefill, first, second) as cluster:
        reply = await cluster.generate(make_request(10))
        assert reply.token_ids() == answer(prompt_of(10), 6)
        assert await told(cluster, "p0", "d0", "d1") == [(1, 0), (1, 1), (1, 0)]


async def test_refusal_of_a_full_worker_is_no_failure() -> None:
    prefill, decode = pair()
    decode.faults["reserve"] = Overloaded("no pages", retry_after_s=0.01)
    async with running_cluster(prefill, decode) as cluster:
        await cluster.generate(make_request(10))
        assert await told(cluster, "p0", "d0") == [(1, 0), (1, 0)]
