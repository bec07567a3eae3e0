"""Figures of a simulated run."""

from pathlib import Path
from typing import Any

import pytest

from common.slo import Slo
from kvrelay.client.events import Forecast
from measure.figures import Percentiles
from measure.load.records import Outcome, RequestRecord, ServerReport
from measure.simulate.records import SimRun, WorkerResult
from measure.simulate.results import ForecastCheck, SimulationSummary, hot_spot, summarize_run
from measure.simulate.store import read_requests, write_requests
from tests.measure.load.made_runs import make_failure, make_request

SLO = Slo(ttft_s=2.0, tpot_s=0.05)


def make_result(index: int = 0, *, num_prompt_tokens: int = 1000, gap_s: float = 0.04, **server: Any) -> RequestRecord:
    """Return a complete request, good by default: 1 s to the first token, eleven tokens 40 ms apart."""
    return make_request(
        index,
        due_s=10.0 + index,
        ttft_s=1.0,
        gaps_s=[gap_s] * 10,
        num_prompt_tokens=num_prompt_tokens,
        server=ServerReport(**({"decode_worker": "decode-0"} | server)),
    )


def make_worker(worker_id: str, *, busy_s: float = 0.0, num_preemptions: int = 0) -> WorkerResult:
    return WorkerResult(
        worker_id=worker_id,
        num_steps=1,
        busy_s=busy_s,
        num_cached_tokens=0,
        num_computed_tokens=0,
        num_preemptions=num_preemptions,
        num_requests=0,
        kv_bytes_sent=0,
        kv_bytes_received=0,
    )


def summary_of(*requests: RequestRecord, workers: tuple[WorkerResult, ...] = ()) -> SimulationSummary:
    run = SimRun(requests=requests, workers=list(workers), end_s=20.0, wall_s=1.0, choice_s=[])
    return summarize_run(run, slo=SLO, num_prefill=0)


def refused(index: int) -> RequestRecord:
    return make_failure(index, Outcome.REFUSED, due_s=10.0 + index, error="Overloaded: the queue is full")


@pytest.mark.parametrize(
    ("num_prompt_tokens", "ttft_s", "is_met"),
    [
        (1, 2.0, True),
        (1, 2.001, False),
        (8192, 2.0, True),
        (8193, 2.0002, True),
        (16_384, 4.0, True),
        (16_384, 4.001, False),
    ],
)
def test_ttft_objective_grows_with_the_prompt(num_prompt_tokens: int, ttft_s: float, is_met: bool) -> None:
    assert SLO.is_good(make_request(ttft_s=ttft_s, num_prompt_tokens=num_prompt_tokens)) is is_met


@pytest.mark.parametrize(
    ("request_", "is_good"),
    [
        (make_result(), True),
        (make_request(ttft_s=0.0, gaps_s=[0.05]), True),
        (make_request(gaps_s=[0.0501]), False),
        (make_request(), True),
        (refused(0), False),
        (make_request(gaps_s=[0.04], outcome=Outcome.FAILED), False),
    ],
)
def test_good_request_is_complete_and_within_both_objectives(request_: RequestRecord, is_good: bool) -> None:
    assert SLO.is_good(request_) is is_good


def test_goodput_counts_refusals_and_misses_as_failures() -> None:
    late = make_request(1, due_s=11.0, ttft_s=19.0)
    summary = summary_of(make_result(0), late, make_result(2, gap_s=0.5), refused(3), make_result(4))
    figures = summary.figures
    assert (figures.num_requests, figures.num_complete, figures.num_not_complete) == (5, 4, 1)
    assert (figures.num_ttft_misses, figures.num_tpot_misses) == (1, 1)
    assert figures.good_share == 2 / 5
    assert summary.goodput_per_s == 2 / 4.0  # arrivals span four seconds


def test_latencies_are_those_of_complete_requests() -> None:
    figures = summary_of(make_result(0), refused(1)).figures
    assert figures.ttft == Percentiles(p50=1.0, p90=1.0, p99=1.0)
    for gaps in (figures.tpot, figures.itl):
        assert gaps is not None
        assert (gaps.p50, gaps.p90, gaps.p99) == pytest.approx((0.04, 0.04, 0.04))
    assert figures.e2e is not None
    assert figures.e2e.p50 == pytest.approx(1.4)


def test_hits_are_shares_of_the_complete_requests_prompt_tokens() -> None:
    summary = summary_of(
        make_result(0, num_cached_tokens=512, num_pulled_tokens=256, predicted_cached_tokens=512),
        make_result(1, num_prompt_tokens=3000, num_cached_tokens=488, predicted_cached_tokens=888),
        refused(2),
    )
    assert summary.token_hit == 1000 / 4000
    assert summary.pulled_share == 256 / 4000
    assert summary.predicted_hit_error == 400 / 4000


def test_run_of_nothing_but_refusals_has_no_latency() -> None:
    summary = summary_of(refused(0))
    assert (summary.figures.ttft, summary.figures.tpot, summary.figures.itl) == (None, None, None)
    assert (summary.figures.good_share, summary.goodput_per_s, summary.token_hit) == (0, 0, 0)


def test_busy_shares_are_of_each_pool_and_the_whole_run() -> None:
    prefill = make_worker("prefill-0", busy_s=10), make_worker("prefill-1", busy_s=4)
    decode = make_worker("decode-0", busy_s=5)
    summary = summary_of(make_result(), workers=(*prefill, decode))
    assert summary.prefill_busy == 14 / 40
    assert summary.decode_busy == 5 / 20
    assert summary_of(make_result(), workers=(decode,)).prefill_busy is None


def test_transfers_and_preemptions_are_added_up() -> None:
    workers = make_worker("decode-0", num_preemptions=2), make_worker("decode-1", num_preemptions=1)
    results = make_result(0, transfer_bytes=7), make_result(1), make_result(2, transfer_bytes=5)
    summary = summary_of(*results, workers=workers)
    assert (summary.num_transfers, summary.transfer_bytes, summary.num_preemptions) == (2, 12, 3)


def test_hot_spot_is_the_largest_share_of_computed_tokens_times_the_workers() -> None:
    results = [
        make_result(0, prefill_worker="prefill-0", num_cached_tokens=500),
        make_result(1, prefill_worker="prefill-1"),
        make_result(2, decode_worker="decode-3"),  # a suffix computed in place: not the prefill pool's
    ]
    assert hot_spot(results, num_workers=4) == pytest.approx(4 * 1000 / 1500)
    assert hot_spot([make_result(0), make_result(1, decode_worker="decode-1")], num_workers=2) == 1
    assert hot_spot([make_result(num_cached_tokens=1000)], num_workers=2) == 1


def test_requests_in_a_file_keep_their_latencies_and_reports(tmp_path: Path) -> None:
    requests = [make_result(0, num_cached_tokens=512), refused(1), make_request(2)]
    write_requests(tmp_path / "requests.jsonl", requests)
    found = list(read_requests(tmp_path / "requests.jsonl"))
    assert [len(request.chunk_s) for request in found] == [2, 0, 1]
    for before, after in zip(requests, found, strict=True):
        for name in ("ttft_s", "tpot_s", "e2e_s", "num_output_tokens", "server", "outcome", "error"):
            assert getattr(after, name) == getattr(before, name)


def test_forecasts_and_their_intervals_are_compared_with_outcomes() -> None:
    forecasts = (
        Forecast(expected_s=1.5),
        Forecast(expected_s=1.1, low_s=0.5, high_s=1.5),
        Forecast(expected_s=0.7, low_s=0.5, high_s=0.9),
    )
    requests = [make_result(index, ttft_s=1.0, ttft_forecast=forecast) for index, forecast in enumerate(forecasts)]
    waited = make_result(3, ttft_s=2.0, line_ttft_forecast=Forecast(expected_s=1.0, low_s=0.5, high_s=2.0))
    summary = summary_of(*requests, waited, refused(4))
    assert summary.ttft_forecast is not None
    assert (summary.ttft_forecast.num_requests, summary.ttft_forecast.held_share) == (3, 0.5)
    assert summary.ttft_forecast.median_error == pytest.approx(0.3)
    assert summary.line_ttft_forecast == ForecastCheck(num_requests=1, median_error=0.5, held_share=1.0)
    assert summary.tpot_forecast is None
