import numpy as np
import pytest

from common.slo import Slo
from measure.load.comparison import Row, RunComparison, compare
from measure.load.measures import summarize
from measure.load.records import Run
from tests.measure.load.made_runs import make_request, make_run

SLO = Slo(ttft_s=0.5, tpot_s=0.05)


def drawn(*, seed: int = 0, factor: float = 1.0, noise: int | None = None, num_requests: int = 400) -> Run:
    """Return a run with lognormal TTFTs; `noise` seeds the differences between runs of the same requests."""
    rng, own = np.random.default_rng(seed), np.random.default_rng(noise)
    due_s = np.cumsum(rng.exponential(0.25, size=num_requests)).tolist()
    ttft_s = factor * rng.lognormal(-1.5, 0.6, size=num_requests)
    if noise is not None:
        ttft_s = ttft_s * own.lognormal(0, 0.05, size=num_requests)
    wanted = rng.integers(1, 1000, size=num_requests).tolist()
    return make_run(
        [
            make_request(i, due_s=due_s[i], ttft_s=ttft_s[i], gaps_s=[0.02, 0.03], num_wanted_tokens=wanted[i])
            for i in range(num_requests)
        ]
    )


def compared(*runs: Run) -> RunComparison:
    return compare(runs, [summarize(run, slo=SLO, warm_up_s=0) for run in runs])


def row(comparison: RunComparison, name: str, kind: str = "all") -> Row:
    return next(row for row in comparison.rows if (row.kind, row.name) == (kind, name))


def test_compare_of_the_same_requests_cancels_their_differences() -> None:
    comparison = compared(drawn(), drawn(factor=1.1))
    assert comparison.is_paired == (True, True)
    cell = row(comparison, "TTFT p50").cells[1]
    assert cell is not None and cell.change is not None
    assert (cell.change.value, cell.change.low, cell.change.high) == pytest.approx((1.1, 1.1, 1.1))
    assert row(comparison, "TTFT p50").verdict(1) is False
    assert row(comparison, "ITL p50").verdict(1) is None


def test_compare_of_other_requests_finds_less() -> None:
    comparison = compared(drawn(), drawn(seed=1, factor=1.1))
    assert comparison.is_paired == (True, False)
    cell = row(comparison, "TTFT p90").cells[1]
    assert cell is not None and cell.change is not None
    assert cell.change.high - cell.change.low > 0.2


@pytest.mark.parametrize("is_paired", [True, False])
def test_compare_finds_false_differences_at_its_nominal_rate(is_paired: bool) -> None:
    num_trials = 30
    num_found = dict.fromkeys(("TTFT p50", "good", "goodput"), 0)
    for trial in range(num_trials):
        seeds = (trial, trial) if is_paired else (trial, 1000 + trial)
        runs = [drawn(seed=seed, noise=2 * trial + i, num_requests=150) for i, seed in enumerate(seeds)]
        comparison = compared(*runs)
        assert comparison.is_paired[1] == is_paired
        for name in num_found:
            num_found[name] += row(comparison, name).verdict(1) is not None
    assert max(num_found.values()) <= 5, num_found  # 1.5 of 30 in the mean


def test_compare_of_shares_gives_their_difference() -> None:
    comparison = compared(drawn(), drawn(factor=3.0))
    good = row(comparison, "good")
    first, second = good.cells
    assert first is not None and second is not None and second.change is not None
    assert second.change.value == pytest.approx(second.value.value - first.value.value)
    assert second.change.value < -0.2
    assert good.verdict(1) is False
    assert good.more_is_better


def test_compare_matches_requests_in_any_order() -> None:
    run = drawn(num_requests=60)
    late = [
        make_request(r.index, due_s=100 - r.due_s, ttft_s=r.ttft_s or 0, num_wanted_tokens=r.num_wanted_tokens)
        for r in run.requests
    ]
    comparison = compared(run, make_run(late))
    assert comparison.is_paired == (True, True)
    cell = row(comparison, "TTFT p50").cells[1]
    assert cell is not None and cell.change is not None
    assert (cell.change.low, cell.change.high) == pytest.approx((1.0, 1.0))


def test_compare_without_good_requests_in_the_first_run_has_no_ratio() -> None:
    found = row(compared(drawn(factor=100.0), drawn()), "goodput")
    assert found.cells[1] is not None
    assert found.cells[1].change is None
    assert found.verdict(1) is None


def test_compare_separates_common_kinds() -> None:
    def kinds(*names: str) -> Run:
        return make_run([make_request(i, due_s=float(i), kind=names[i % len(names)]) for i in range(40)])

    comparison = compared(kinds("chat", "batch"), kinds("chat", "batch", "agent"))
    assert sorted({row.kind for row in comparison.rows}) == ["all", "batch", "chat"]
    alone = compared(kinds("chat", "batch"), kinds("agent"))
    assert {row.kind for row in alone.rows} == {"all"}
