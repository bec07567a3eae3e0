"""Intervals learned from outcomes, and the forecasts made with them."""

import math
import random
from dataclasses import replace

import pytest

from common.ids import RequestId, WorkerId
from router.choosing.forecasts import MAX_ERROR, Forecaster
from router.fleet.decisions import DecisionRecord
from router.placement.calibration import MIN_OUTCOMES, WINDOW, ErrorBand
from router.placement.plans import PlacementRequest, Plan

REQUEST = PlacementRequest(request_id=RequestId("r0"), num_tokens=100, block_size=16, received_s=10.0, now_s=13.0)
LOCAL = Plan(
    answering=WorkerId("d0"), predicted_cached_tokens=0, reason="", predicted_ttft_s=1.0, predicted_tpot_s=0.02
)
REMOTE = replace(LOCAL, prefill=WorkerId("p0"))


def teach(band: ErrorBand, *ratios: float) -> None:
    for ratio in ratios:
        band.learn(band.forecast(1.0), ratio)


def test_forecast_has_no_interval_before_enough_outcomes() -> None:
    band = ErrorBand()
    teach(band, *[2.0] * (MIN_OUTCOMES - 1))
    assert (band.forecast(1.0).expected_s, band.forecast(1.0).low_s, band.forecast(1.0).high_s) == (1.0, None, None)
    teach(band, 2.0)
    assert band.forecast(1.0).low_s is not None


def test_forecast_of_a_model_that_is_always_too_low_is_corrected() -> None:
    band = ErrorBand()
    teach(band, *[1.5, 2.0, 3.0] * 20)
    assert band.forecast(0.5).expected_s == pytest.approx(1.0)


def test_time_that_has_passed_is_certain_and_only_the_rest_is_scaled() -> None:
    band = ErrorBand()
    for actual_s in [10.5, 11.0, 12.0] * 20:
        band.learn(band.forecast(1.0, passed_s=10.0), actual_s)
    forecast = band.forecast(3.0, passed_s=10.0)
    assert (forecast.low_s, forecast.expected_s, forecast.high_s) == pytest.approx((11.5, 13.0, 16.0))


def held_share(band: ErrorBand, draws: list[float]) -> float:
    num_held = 0
    for actual_s in draws:
        forecast = band.forecast(1.0)
        num_held += (forecast.low_s or 0.0) <= actual_s <= (forecast.high_s or math.inf)
        band.learn(forecast, actual_s)
    return num_held / len(draws)


def test_intervals_hold_eight_of_ten_outcomes_before_and_after_the_errors_grow() -> None:
    chance, band = random.Random(1), ErrorBand()
    held_share(band, [chance.lognormvariate(0.3, 0.2) for _ in range(WINDOW)])
    assert held_share(band, [chance.lognormvariate(0.3, 0.2) for _ in range(1000)]) == pytest.approx(0.8, abs=0.03)
    assert held_share(band, [chance.lognormvariate(0.6, 0.8) for _ in range(1000)]) == pytest.approx(0.8, abs=0.05)


def test_intervals_hold_eight_of_ten_outcomes_while_these_become_ever_longer() -> None:
    chance, band = random.Random(1), ErrorBand()
    # A window of the latest errors alone lags behind such a drift, and holds fewer.
    drift = [chance.lognormvariate(number / 1000, 0.2) for number in range(3000)]
    assert held_share(band, drift) == pytest.approx(0.8, abs=0.04)


def test_old_errors_are_forgotten() -> None:
    band = ErrorBand()
    teach(band, *[9.0] * WINDOW, *[1.0] * WINDOW)
    forecast = band.forecast(1.0)
    assert (forecast.low_s, forecast.expected_s, forecast.high_s) == pytest.approx((1.0, 1.0, 1.0))


def test_outcome_that_came_at_once_is_no_error_of_any_size() -> None:
    band = ErrorBand()
    for _ in range(MIN_OUTCOMES):
        band.learn(band.forecast(1.0, passed_s=2.0), 2.0)
        band.learn(band.forecast(0.0), 1.0)
    assert band.forecast(1.0).low_s is None


def decision(forecaster: Forecaster, plan: Plan = REMOTE, *, ttft_s: float) -> DecisionRecord:
    """Return an ended decision on a request that waited 3 s, whose line forecast was 2 s."""
    return DecisionRecord(
        request_id=REQUEST.request_id,
        tenant=REQUEST.tenant.name,
        num_tokens=REQUEST.num_tokens,
        plan=plan,
        decided_s=REQUEST.now_s,
        waited_s=REQUEST.waited_s,
        line_forecast=forecaster.in_line(2.0, passed_s=0.0),
        ttft_forecast=forecaster.ttft(REQUEST, plan),
        tpot_forecast=forecaster.tpot(plan),
        ttft_s=ttft_s,
        tpot_s=0.03,
    )


def test_whole_ttft_counts_the_wait_in_line_and_learns_errors_by_kind_of_plan() -> None:
    forecaster = Forecaster()
    for _ in range(MIN_OUTCOMES):
        forecaster.learn(decision(forecaster, ttft_s=1.5))
        forecaster.learn(decision(forecaster, LOCAL, ttft_s=1.0))
    remote, local = forecaster.ttft(REQUEST, REMOTE), forecaster.ttft(REQUEST, LOCAL)
    assert remote is not None
    assert local is not None
    assert (remote.expected_s, local.expected_s) == pytest.approx((3.0 + 1.5, 3.0 + 1.0))


def test_forecast_in_line_learns_from_the_whole_ttft_and_that_of_the_gap_from_gaps() -> None:
    forecaster = Forecaster()
    for _ in range(MIN_OUTCOMES):
        forecaster.learn(decision(forecaster, ttft_s=3.0))
    assert forecaster.in_line(1.0, passed_s=0.0).expected_s == pytest.approx(3.0)
    gap = forecaster.tpot(REMOTE)
    assert gap is not None
    assert gap.expected_s == pytest.approx(0.03)


@pytest.mark.parametrize(("actual_s", "factor"), [(0.022, 1.1), (0.015, 1.0), (0.2, MAX_ERROR)])
def test_batches_allow_for_gaps_that_are_longer_than_predicted_within_bounds(actual_s: float, factor: float) -> None:
    forecaster, plan = Forecaster(), replace(REMOTE, predicted_tpot_s=0.02)
    assert forecaster.gap_error() == 1.0
    for _ in range(MIN_OUTCOMES):
        forecaster.learn(replace(decision(forecaster, plan, ttft_s=1.0), tpot_s=actual_s))
    assert forecaster.gap_error() == pytest.approx(factor)


def test_batches_are_filled_to_the_objective_again_when_load_no_longer_rises() -> None:
    forecaster, plan = Forecaster(), replace(REMOTE, predicted_tpot_s=0.02)
    for actual_s, factor in ((0.03, MAX_ERROR), (0.02, 1.0)):
        for _ in range(WINDOW):
            forecaster.learn(replace(decision(forecaster, plan, ttft_s=1.0), tpot_s=actual_s))
        assert forecaster.gap_error() == pytest.approx(factor)


def test_plan_without_predictions_or_after_the_first_token_has_no_ttft_forecast() -> None:
    forecaster, bare = Forecaster(), replace(REMOTE, predicted_ttft_s=None, predicted_tpot_s=None)
    assert (forecaster.ttft(REQUEST, bare), forecaster.tpot(bare)) == (None, None)
    assert forecaster.ttft(replace(REQUEST, has_begun=True), REMOTE) is None


def test_attempt_that_ended_without_a_token_teaches_nothing() -> None:
    forecaster = Forecaster()
    for _ in range(MIN_OUTCOMES):
        lost = decision(forecaster, ttft_s=9.0)
        lost.ttft_s = lost.tpot_s = None
        forecaster.learn(lost)
    assert forecaster.in_line(1.0, passed_s=0.0).low_s is None
