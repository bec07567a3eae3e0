import math
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.workload.lengths import Distribution, parse_distribution

positive = st.floats(0.01, 1e6)
shares = st.floats(0.0001, 0.9999)


@st.composite
def distributions(draw: st.DrawFn) -> Distribution:
    kind = draw(st.sampled_from(["constant", "uniform", "normal", "lognormal", "exponential"]))
    first = draw(positive)
    second = {"uniform": first + draw(positive), "normal": draw(positive), "lognormal": draw(st.floats(0, 2))}.get(kind)
    low = draw(st.none() | positive)
    high = draw(st.none() | st.floats(low or 0.01, 1e7))
    return Distribution(kind, (first,) if second is None else (first, second), low, high)


@given(distributions(), shares, shares)
def test_quantiles_rise_within_the_bounds(distribution: Distribution, one: float, two: float) -> None:
    lower, upper = (distribution.quantile(share) for share in sorted((one, two)))
    assert distribution.least <= lower <= upper <= distribution.most
    assert 1 <= distribution.count_at(min(one, two)) <= distribution.count_at(max(one, two))


@given(distributions())
def test_distribution_is_read_back_as_it_was_written(distribution: Distribution) -> None:
    again = parse_distribution(str(distribution))
    assert again.kind == distribution.kind
    assert again.parameters == pytest.approx(distribution.parameters, rel=1e-14)
    assert (again.low is None, again.high is None) == (distribution.low is None, distribution.high is None)
    assert str(parse_distribution(str(again))) == str(again)


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        (300, 300),
        ("2.0", 2),
        ("uniform:20,60", 40),
        ("uniform:1,2", 1.5),
        ("normal:300,40", 300),
        ("lognormal:400,0.8", 400 * math.exp(0.32)),
        ("exponential:50", 50),
        ("exponential:50,max=0.5", 1),
        ("uniform:0,10,min=10", 10),
    ],
)
def test_counts_have_the_reported_mean(text: object, mean: float) -> None:
    distribution = parse_distribution(text)
    random = Random(1)
    drawn = [distribution.draw_count(random) for _ in range(20_000)]
    spread = statistics.stdev(drawn)
    assert distribution.mean_count == pytest.approx(mean, rel=0.002)
    assert statistics.fmean(drawn) == pytest.approx(mean, abs=4 * spread / math.sqrt(len(drawn)) + 1e-9)


def test_uniform_counts_come_equally_often_ends_included() -> None:
    distribution = parse_distribution("uniform:1,4")
    drawn = [distribution.count_at((index + 0.5) / 1000) for index in range(1000)]
    assert {count: drawn.count(count) for count in set(drawn)} == {1: 250, 2: 250, 3: 250, 4: 250}


def test_lognormal_has_its_median_and_sigma() -> None:
    distribution = parse_distribution("lognormal:400,0.8")
    assert distribution.quantile(0.5) == pytest.approx(400)
    assert distribution.quantile(0.8413447) == pytest.approx(400 * math.exp(0.8), rel=1e-5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (True, "must be a number, or one of uniform:LOW,HIGH"),
        (None, "must be a number"),
        ([1], "must be a number"),
        ("", "'' is not a number"),
        ("many", "'many' is not a number"),
        ("inf", "'inf' is not finite"),
        ("zipf:3", "'zipf' is not a distribution"),
        ("uniform:3", "uniform takes 2 numbers, not 1"),
        ("exponential:3,4", "exponential takes 1 numbers, not 2"),
        ("uniform:4,3", "its upper end is below its lower end"),
        ("normal:4,-3", "its spread is negative"),
        ("lognormal:0,1", "must have a positive first number"),
        ("exponential:-1", "must have a positive first number"),
        ("normal:4,3,mean=2", "mean= is unknown"),
        ("normal:4,3,min=2,min=3", "is unknown or repeated"),
        ("normal:4,3,min=5,max=2", "max is below min"),
        ("normal:4,3,max=", "'' is not a number"),
    ],
)
def test_bad_distribution_is_refused_with_the_reason(text: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_distribution(text)
