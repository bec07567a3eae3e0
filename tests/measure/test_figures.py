import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.slo import Slo
from measure.figures import by_kind, histogram_quantiles, percentiles, summarize
from measure.load.records import Outcome
from tests.measure.load.made_runs import make_failure, make_request

SLO = Slo(ttft_s=0.5, tpot_s=0.05)
COUNTED = st.dictionaries(st.floats(0, 1e3), st.integers(0, 5), min_size=1, max_size=30)


def test_figures_count_misses_of_complete_requests_and_failures_as_not_good() -> None:
    found = summarize(
        [
            make_request(0, ttft_s=0.1, gaps_s=[0.01, 0.03]),
            make_request(1, ttft_s=0.7, gaps_s=[0.08]),
            make_request(2, ttft_s=0.3),
            make_failure(3, Outcome.REFUSED),
        ],
        slo=SLO,
    )
    assert (found.num_requests, found.num_complete, found.num_not_complete, found.num_good) == (4, 3, 1, 2)
    assert (found.num_ttft_misses, found.num_tpot_misses, found.good_share) == (1, 1, 0.5)
    assert found.ttft is not None and found.tpot is not None
    assert (found.ttft.p50, found.tpot.p50) == pytest.approx((0.3, 0.05))
    assert found.itl is None


def test_figures_of_no_requests_have_no_latencies_and_no_good_share() -> None:
    found = summarize([], slo=SLO)
    assert (found.num_requests, found.good_share, found.ttft, found.e2e) == (0, 0.0, None, None)


def test_by_kind_lists_all_requests_first_and_then_each_kind_by_name() -> None:
    requests = [make_request(i, kind=kind) for i, kind in enumerate(["chat", "batch", "chat"])]
    found = {kind: [request.index for request in own] for kind, own in by_kind(requests).items()}
    assert list(found.items()) == [("all", [0, 1, 2]), ("batch", [1]), ("chat", [0, 2])]


def test_percentiles_interpolate_between_the_nearest_values_and_skip_missing_ones() -> None:
    for found in (percentiles([None, *range(1, 101)]), percentiles(range(1, 101), [1] * 100)):
        assert found is not None
        assert (found.p50, found.p90, found.p99) == pytest.approx((50.5, 90.1, 99.01))


@pytest.mark.parametrize("counts", [None, [0, 0]])
def test_percentiles_of_no_values_are_none(counts: list[int] | None) -> None:
    assert percentiles([] if counts is None else [1.0, 2.0], counts) is None


@given(COUNTED)
def test_histogram_quantiles_are_numpys_of_the_repeated_values(counted: dict[float, int]) -> None:
    values, counts = np.array(sorted(counted)), np.array([counted[value] for value in sorted(counted)])
    shares = [0.0, 0.5, 0.9, 0.99, 1.0]
    (found,) = histogram_quantiles(values, counts[None, :], shares)
    repeated = np.repeat(values, counts)
    assert found == pytest.approx(np.quantile(repeated, shares) if repeated.size else [np.nan] * 5, nan_ok=True)
