"""Figures of served requests."""

from pathlib import Path
from typing import Any

import pytest

from common.slo import Slo
from kvrelay.client.events import Forecast
from measure.experiment.points import Cell, Goals, Point, Source, point_of
from measure.load.records import Outcome, RequestRecord, ServerReport
from measure.load.window import find_window
from measure.simulate.records import SimRun
from measure.simulate.results import ForecastCheck, hot_spot
from measure.simulate.store import read_requests, write_requests
from tests.measure.experiment.builders import make_arm
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


def served(*requests: RequestRecord) -> Point:
    window = find_window(requests, warm_up_s=0.0, cool_down_s=None)
    run = SimRun(requests=requests, workers=[], end_s=20.0, wall_s=1.0, choice_s=[])
    cell = Cell(arm="arm", load=1.0, repeat=0)
    return point_of(run, window, arm=make_arm(0, 1), cell=cell, source=Source.SIMULATED, goals=Goals(slo=SLO))


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
    figures = served(make_result(0), late, make_result(2, gap_s=0.5), refused(3), make_result(4)).overall
    assert (figures.num_requests, figures.num_complete, figures.num_not_complete) == (5, 4, 1)
    assert (figures.num_ttft_misses, figures.num_tpot_misses) == (1, 1)
    assert figures.good_share == 2 / 5


def test_hits_are_shares_of_the_reported_requests_prompt_tokens() -> None:
    point = served(
        make_result(0, num_cached_tokens=512, num_pulled_tokens=256, transfer_bytes=7),
        make_result(1, num_prompt_tokens=3000, num_cached_tokens=488),
        refused(2),
    )
    assert (point.token_hit, point.pulled_share, point.transfer_bytes) == (1000 / 4000, 256 / 4000, 7)


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
    checks = served(*requests, waited, refused(4)).forecasts
    assert checks["TTFT, entering the line"] == ForecastCheck(num_requests=1, median_error=0.5, held_share=1.0)
    at_choice = checks["TTFT, at the choice"]
    assert (at_choice.num_requests, at_choice.held_share) == (3, 0.5)
    assert at_choice.median_error == pytest.approx(0.3)
    assert "TPOT" not in checks
