"""What requests are told of the cache is what a reference account says; `benchmarks/cache_account.py` asks far more."""

import pytest

from tests.router.cache_account import Cluster


@pytest.mark.parametrize("seed", [1, 2])
def test_usage_is_that_of_the_reference_account_over_workers_and_routers(seed: int) -> None:
    cluster = Cluster(num_workers=3, num_routers=2, seed=seed)
    written = refused = read = 0
    for number, (told, expected) in enumerate(cluster.served(600)):
        assert told == expected, number
        read += told[0]
        written += sum(num_tokens for _, num_tokens in told[1])
        refused += told[3]
    assert min(read, written, refused) > 1000
    evicted = sum(sum(core.pool.lives) for core, _ in cluster.workers)
    assert evicted > 1000, "the pages were too many for evictions"
