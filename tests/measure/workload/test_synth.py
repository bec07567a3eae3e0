from pathlib import Path

import pytest

from measure.workload.synth import AGENT, CHAT, SynthSettings, synthesize
from measure.workload.trace_stats import round_robin_hits, sticky_hits, trace_stats
from measure.workload.traces import read_trace

SMALL = Path(__file__).parents[2] / "data" / "small.jsonl"


def test_equal_settings_give_an_equal_trace_and_another_seed_another() -> None:
    assert synthesize(SynthSettings(num_requests=50)) == synthesize(SynthSettings(num_requests=50))
    assert synthesize(SynthSettings(num_requests=50, seed=1)) != synthesize(SynthSettings(num_requests=50))


def test_long_trace_has_the_statistics_of_the_published_one() -> None:
    trace = synthesize(SynthSettings(num_requests=12_000))
    stats = trace_stats(trace)
    assert stats.num_requests / stats.duration_s == pytest.approx(3.4, rel=0.05)
    assert 15 <= stats.max_burst <= 30
    assert stats.prompt_tokens.p50 == pytest.approx(6_909, rel=0.1)
    assert stats.prompt_tokens.mean == pytest.approx(12_035, rel=0.1)
    assert stats.prompt_tokens.p90 == pytest.approx(27_367, rel=0.1)
    assert stats.prompt_tokens.p99 == pytest.approx(85_401, rel=0.2)
    assert stats.output_tokens.p50 == pytest.approx(350, rel=0.05)
    assert stats.infinite_cache_hit == pytest.approx(0.3664, abs=0.03)
    assert stats.share_beyond_first == pytest.approx(0.387, abs=0.03)
    sticky = sticky_hits(trace, num_workers=8, blocks_per_worker=3000)
    assert sticky.block_hit > 2 * round_robin_hits(trace, num_workers=8, blocks_per_worker=3000).block_hit


def test_every_turn_of_a_session_extends_the_one_before() -> None:
    only = SynthSettings(num_requests=40, requests_per_s=0.2, kinds=(AGENT,), num_system_prompts=1, burst_period_s=0)
    sessions: dict[tuple[int, ...], int] = {}
    num_extended = 0
    for request in synthesize(only).requests:
        full = request.block_ids[: request.num_prompt_tokens // 512]
        for end in range(len(full), 3, -1):
            if full[:end] in sessions:
                num_extended += 1
                assert request.num_prompt_tokens > sessions.pop(full[:end])
                break
        sessions[full] = request.num_prompt_tokens
    assert num_extended > 10


def test_arrivals_without_bursts_come_one_by_one() -> None:
    trace = synthesize(SynthSettings(num_requests=200, kinds=(CHAT,), burst_period_s=0))
    assert len({request.arrival_s for request in trace.requests}) == 200


def test_small_trace_that_ships_is_the_generators(tmp_path: Path) -> None:
    trace = read_trace(SMALL)
    assert trace.requests == synthesize(SynthSettings(num_requests=800)).requests
    stats = trace_stats(trace)
    assert 0.2 < stats.infinite_cache_hit < 0.37
    assert stats.max_burst >= 10
