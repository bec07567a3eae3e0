import numpy as np
import pytest

from measure.workload.traces import Trace, TraceError, TraceRequest
from measure.workload.waves import Day, in_stages, over_a_day, repeated


def make_trace(count: int = 1000, gap_s: float = 1.0) -> Trace:
    requests = tuple(
        TraceRequest(arrival_s=gap_s * i, num_prompt_tokens=20, num_output_tokens=1 + i, block_ids=(0, 1 + i))
        for i in range(count)
    )
    return Trace(name="even", block_size=16, requests=requests)


def test_day_warp_of_evenly_spread_shares_follows_the_rate() -> None:
    day = Day(length_s=2400.0)

    arrivals = day.warp(np.linspace(0, 1, 100_001))

    counts, edges = np.histogram(arrivals, bins=48, range=(0, 2400.0))
    rates = day.rate((edges[1:] + edges[:-1]) / 2)
    assert counts / counts.max() == pytest.approx(rates / rates.max(), abs=0.02)
    assert arrivals[0] == 0.0
    assert arrivals[-1] == 2400.0


def test_day_rate_has_its_peak_at_one_and_a_trough_of_a_fifth() -> None:
    rates = Day(length_s=24.0).rate(np.arange(0, 24, 0.25))

    assert rates.max() == 1.0
    assert 0.15 <= rates.min() <= 0.25


def test_over_a_day_keeps_requests_and_their_order() -> None:
    trace = make_trace()

    warped = over_a_day(trace, Day(length_s=600.0))

    assert [r.num_output_tokens for r in warped.requests] == [r.num_output_tokens for r in trace.requests]
    assert [r.block_ids for r in warped.requests] == [r.block_ids for r in trace.requests]
    times = [r.arrival_s for r in warped.requests]
    assert times == sorted(times)
    assert warped.duration_s == pytest.approx(600.0)


def test_over_a_day_refuses_requests_that_come_at_once() -> None:
    with pytest.raises(TraceError, match="all requests come at once"):
        over_a_day(make_trace(gap_s=0.0), Day(length_s=600.0))


def test_repeated_trace_shares_no_content_between_its_parts() -> None:
    trace = make_trace(10)

    twice = repeated(trace, 2)

    first, second = twice.requests[:10], twice.requests[10:]
    assert first == trace.requests
    assert [r.num_output_tokens for r in second] == [r.num_output_tokens for r in first]
    assert not {b for r in first for b in r.block_ids} & {b for r in second for b in r.block_ids}
    assert len({r.block_ids[0] for r in second}) == 1  # shared blocks stay shared
    assert np.diff([r.arrival_s for r in twice.requests]).min() > 0


def test_trace_cannot_be_repeated_zero_times() -> None:
    with pytest.raises(TraceError, match="0 times"):
        repeated(make_trace(2), 0)


def test_stages_play_the_trace_at_their_speeds_again_and_again() -> None:
    trace = make_trace(29, gap_s=15.0)

    warped = in_stages(trace, [(60, 0.5), (60, 3)])  # a round of 120 s plays 30 + 180 s

    times = {before.arrival_s: after.arrival_s for before, after in zip(trace.requests, warped.requests, strict=True)}
    played = [times[at_s] for at_s in (0, 15, 30, 90, 210, 225, 240, 300, 420)]
    assert played == pytest.approx([0, 30, 60, 80, 120, 150, 180, 200, 240])


def test_trace_in_stages_has_their_rates_and_keeps_requests_and_order() -> None:
    trace = make_trace(470, gap_s=1.0)

    warped = in_stages(trace, [(60, 1), (20, 8), (300, 1)])

    times = [request.arrival_s for request in warped.requests]
    counts, _ = np.histogram(times, bins=[0, 60, 80, 329.5])
    assert counts.tolist() == [60, 160, 250]
    assert times == sorted(times)
    assert [r.block_ids for r in warped.requests] == [r.block_ids for r in trace.requests]
