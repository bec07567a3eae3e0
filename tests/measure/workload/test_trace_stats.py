import pytest

from measure.workload.trace_stats import LruBlocks, round_robin_hits, stats_table, sticky_hits, trace_stats
from measure.workload.traces import Trace, TraceRequest

BLOCK = 512


def make_trace(*prompts: tuple[int, ...]) -> Trace:
    """Return a trace with one request per second and full blocks only."""
    return Trace(
        name="made",
        block_size=BLOCK,
        requests=tuple(
            TraceRequest(arrival_s=at_s, num_prompt_tokens=BLOCK * len(ids), num_output_tokens=at_s + 1, block_ids=ids)
            for at_s, ids in enumerate(prompts)
        ),
    )


def test_stats_count_leading_blocks_that_came_before() -> None:
    stats = trace_stats(make_trace((0, 1, 2), (0, 1, 3, 2), (9, 1), (0,)))
    assert stats.num_blocks == 10
    assert stats.num_unique_blocks == 5
    assert stats.infinite_cache_hit == pytest.approx(3 / 10)  # (0, 1) and (0): 2 behind the new 3 is none
    assert stats.share_beyond_first == pytest.approx(1 / 4)
    assert stats.max_burst == 1
    assert (stats.prompt_tokens.mean, stats.prompt_tokens.max) == (2.5 * BLOCK, 4 * BLOCK)
    assert stats.output_tokens.p50 == 2.5


@pytest.mark.parametrize(("num_requests", "rate"), [(1, "all at once"), (4, "1.33 requests/s")])
def test_rate_of_a_trace_is_told_also_where_no_time_passes(num_requests: int, rate: str) -> None:
    cells = stats_table(trace_stats(make_trace(*[(0,)] * num_requests))).columns[1].cells
    assert f"{rate}, at most 1 in one second" in cells


def test_lru_evicts_the_last_blocks_of_a_prompt_first() -> None:
    cache = LruBlocks(4)
    cache.use((0, 1, 2))
    cache.use((7, 8))
    assert cache.leading((0, 1, 2)) == 2
    assert cache.leading((7, 8)) == 2


def test_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = LruBlocks(2)
    cache.use((0, 1, 2, 3))
    assert cache.leading((0, 1, 2, 3)) == 2


def test_round_robin_finds_only_prefixes_on_the_same_worker() -> None:
    hits = round_robin_hits(make_trace((0, 1), (0, 1), (0, 1), (5, 6)), num_workers=2, blocks_per_worker=8)
    assert hits.block_hit == pytest.approx(2 / 8)
    assert hits.hot_spot == pytest.approx(2 * 4 / 6)


def test_sticky_follows_the_prefix_and_ignores_a_lone_first_block() -> None:
    hits = sticky_hits(make_trace((0, 1, 2), (0, 3, 4), (0, 3, 4), (0, 1, 2)), num_workers=2, blocks_per_worker=8)
    assert hits.block_hit == pytest.approx(6 / 12)
    assert hits.hot_spot == 1
