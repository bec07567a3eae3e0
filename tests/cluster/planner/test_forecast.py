import random

import pytest

from cluster.planner.forecast import ArrivalForecast, RateTrend

INTERVAL_S = 10.0


def trends_of(rates: list[float], *, memory_s: float = 300.0, burstiness: float = 1.0) -> list[RateTrend]:
    forecast = ArrivalForecast(memory_s=memory_s)
    trends = []
    for number, rate in enumerate(rates, start=1):
        now_s = number * INTERVAL_S
        forecast.add(now_s, num_arrived=round(rate * INTERVAL_S), window_s=INTERVAL_S, burstiness=burstiness)
        trends.append(forecast.trend(now_s))
    return trends


def test_trend_of_a_constant_rate_is_that_rate_without_a_slope() -> None:
    last = trends_of([5.0] * 30)[-1]
    assert last.rate == pytest.approx(5.0)
    assert last.slope == 0.0
    assert last.num_points > 20


def test_trend_of_a_ramp_leads_to_where_it_will_be() -> None:
    last = trends_of([10.0 + 0.5 * number for number in range(30)])[-1]
    assert last.ahead(60.0) == pytest.approx(10.0 + 0.5 * (29 + 0.5 + 6), rel=0.03)


def test_trend_after_a_step_forgets_what_was_before_at_once() -> None:
    last = trends_of([5.0] * 20 + [20.0])[-1]
    assert (last.rate, last.slope, last.num_points) == (20.0, 0.0, 1)


def test_trend_of_a_fall_does_not_predict_less_than_now() -> None:
    last = trends_of([20.0 - 0.5 * number for number in range(30)])[-1]
    assert last.slope < 0.0
    assert last.ahead(300.0) == last.rate


def test_trend_never_predicts_more_than_twice_the_present() -> None:
    last = trends_of([10.0 + 2.0 * number for number in range(10)])[-1]
    assert last.ahead(1e6) == 2.0 * last.rate


def test_trend_of_poisson_counts_knows_the_rate_better_than_one_window() -> None:
    random_ = random.Random(1)
    rates = [sum(random_.random() < 0.05 for _ in range(1000)) / INTERVAL_S for _ in range(60)]
    seen = [line.rate for line in trends_of(rates)[30:]]
    assert sum(abs(rate - 5.0) for rate in seen) < 0.7 * sum(abs(rate - 5.0) for rate in rates[30:])


def test_trend_of_bursty_counts_believes_no_single_one() -> None:
    last = trends_of([5.0] * 20 + [8.0], burstiness=10.0)[-1]
    assert last.rate < 6.0
