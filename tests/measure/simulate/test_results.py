import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from common.slo import Slo
from measure.simulate.records import RequestResult, SimRun, WorkerResult
from measure.simulate.results import Percentiles, Summary, gap_percentile, hot_spot, summarize

SLO = Slo(ttft_s=2.0, tpot_s=0.05)


def make_result(index: int = 0, **changes: Any) -> RequestResult:
    """Complete and good: 1 s to the first token, eleven tokens 40 ms apart."""
    values: dict[str, Any] = {
        "index": index,
        "arrival_s": 10.0 + index,
        "num_prompt_tokens": 1000,
        "first_token_s": 11.0 + index,
        "end_s": 11.4 + index,
        "num_output_tokens": 11,
        "gap_sum_s": 0.4,
        "decode_worker": "decode-0",
    }
    return RequestResult(**(values | changes))


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


def make_run(
    *results: RequestResult, workers: Sequence[WorkerResult] = (), gaps: Sequence[tuple[float, int]] = ()
) -> SimRun:
    return SimRun(results=list(results), workers=list(workers), gaps=gaps, end_s=20.0, wall_s=1.0, choice_s=[])


REFUSED: dict[str, Any] = {
    "first_token_s": None,
    "num_output_tokens": 0,
    "gap_sum_s": 0.0,
    "refusal": "Overloaded: the queue is full",
}


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
    result = make_result(num_prompt_tokens=num_prompt_tokens, arrival_s=0.0, first_token_s=ttft_s)
    assert SLO.is_good(result) is is_met


@pytest.mark.parametrize(
    ("changes", "is_good"),
    [
        ({}, True),
        ({"gap_sum_s": 0.5}, True),
        ({"gap_sum_s": 0.501}, False),
        ({"num_output_tokens": 1, "gap_sum_s": 0.0}, True),
        (REFUSED, False),
        ({"refusal": "WorkerLost: decode-0"}, False),
        ({"end_s": None}, False),
    ],
)
def test_good_request_is_complete_and_within_both_objectives(changes: dict[str, Any], is_good: bool) -> None:
    assert SLO.is_good(make_result(**changes)) is is_good


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).lognormal(size=101)
    found = Percentiles.of(iter(values))
    assert found is not None
    assert (found.p50, found.p90, found.p99) == tuple(np.percentile(values, [50, 90, 99]))
    assert Percentiles.of([]) is None


def test_goodput_counts_refusals_and_misses_as_failures() -> None:
    summary = summarize(
        make_run(
            make_result(0),
            make_result(1, first_token_s=30.0, end_s=31.0),
            make_result(2, gap_sum_s=5.0),
            make_result(3, **REFUSED),
            make_result(4),
        ),
        slo=SLO,
        num_prefill=0,
    )
    assert (summary.num_requests, summary.num_complete, summary.num_refused) == (5, 4, 1)
    assert (summary.num_ttft_misses, summary.num_itl_misses) == (1, 1)
    assert summary.good_share == 2 / 5
    assert summary.goodput_per_s == 2 / 4.0  # arrivals span four seconds


def test_latencies_are_those_of_complete_requests() -> None:
    summary = summarize(make_run(make_result(0), make_result(1, **REFUSED)), slo=SLO, num_prefill=0)
    assert summary.ttft == Percentiles(p50=1.0, p90=1.0, p99=1.0)
    assert summary.itl == Percentiles(p50=0.04, p90=0.04, p99=0.04)
    assert summary.e2e is not None
    assert summary.e2e.p50 == pytest.approx(1.4)


def test_hits_are_shares_of_the_complete_requests_prompt_tokens() -> None:
    summary = summarize(
        make_run(
            make_result(0, num_cached_tokens=512, num_pulled_tokens=256, predicted_cached_tokens=512),
            make_result(1, num_prompt_tokens=3000, num_cached_tokens=488, predicted_cached_tokens=888),
            make_result(2, num_cached_tokens=1000, **REFUSED),
        ),
        slo=SLO,
        num_prefill=0,
    )
    assert summary.token_hit == 1000 / 4000
    assert summary.pulled_share == 256 / 4000
    assert summary.predicted_hit_error == 400 / 4000


def test_run_of_nothing_but_refusals_has_no_latency() -> None:
    summary = summarize(make_run(make_result(0, **REFUSED)), slo=SLO, num_prefill=0)
    assert (summary.ttft, summary.itl, summary.gap_p99_s) == (None, None, None)
    assert (summary.good_share, summary.goodput_per_s, summary.token_hit) == (0, 0, 0)


def test_busy_shares_are_of_each_pool_and_the_whole_run() -> None:
    workers = [
        make_worker("prefill-0", busy_s=10),
        make_worker("prefill-1", busy_s=4),
        make_worker("decode-0", busy_s=5),
    ]
    summary = summarize(make_run(make_result(), workers=workers), slo=SLO, num_prefill=2)
    assert summary.prefill_busy == 14 / 40
    assert summary.decode_busy == 5 / 20
    alone = summarize(make_run(make_result(), workers=workers[2:]), slo=SLO, num_prefill=0)
    assert alone.prefill_busy is None


def test_transfers_and_preemptions_are_added_up() -> None:
    workers = [make_worker("decode-0", num_preemptions=2), make_worker("decode-1", num_preemptions=1)]
    run = make_run(make_result(0, transfer_bytes=7), make_result(1), make_result(2, transfer_bytes=5), workers=workers)
    summary = summarize(run, slo=SLO, num_prefill=0)
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


def test_gap_percentile_is_the_bin_that_holds_it() -> None:
    gaps = [(0.01, 0), (0.02, 50), (0.04, 49), (1.0, 1)]
    assert gap_percentile(gaps, 0.5) == 0.02
    assert gap_percentile(gaps, 0.99) == 0.04
    assert gap_percentile(gaps, 1.0) == 1.0
    assert gap_percentile([], 0.5) is None


def test_summary_survives_json() -> None:
    summary = summarize(make_run(make_result(), workers=[make_worker("decode-0")]), slo=SLO, num_prefill=0)
    assert Summary.from_json(json.loads(json.dumps(asdict(summary)))) == summary
