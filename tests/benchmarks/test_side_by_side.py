"""The arms of a comparison, and its figures."""

from collections.abc import Sequence

import pytest

from benchmarks.side_by_side.arms import ARMS, figures_of, plan_of
from measure.experiment.points import Point, Source
from measure.figures import ALL, Figures, Percentiles


def make_points(ttfts_s: Sequence[float]) -> list[Point]:
    return [
        Point(
            arm=plan_of("vllm-cpu").arm,
            source=Source.REAL,
            load=1.0,
            repeat=repeat,
            duration_s=10.0,
            kinds={ALL: make_figures(ttft_s)},
            output_tokens_per_s=80.0,
            token_hit=0.25,
            prefill_busy=None,
            decode_busy=None,
            kv_peak=None,
            transfer_bytes=0,
            transfer_exposed_p50_s=None,
        )
        for repeat, ttft_s in enumerate(ttfts_s)
    ]


def make_figures(ttft_s: float) -> Figures:
    return Figures(
        num_requests=20,
        num_complete=20,
        num_good=15,
        num_ttft_misses=5,
        num_tpot_misses=0,
        ttft=Percentiles(p50=ttft_s, p90=ttft_s, p99=ttft_s),
        itl=None,
        tpot=None,
        e2e=None,
    )


@pytest.mark.parametrize("name", ARMS)
def test_arms_have_as_many_threads(name: str) -> None:
    plan = plan_of(name)

    assert plan.arm.num_threads == 2
    assert plan.serving is None


def test_figures_have_a_value_of_each_repeat_and_leave_out_what_was_not_measured() -> None:
    figures = figures_of(make_points([0.1, 0.3, 0.2])).all

    assert figures["1 requests/s: TTFT", ALL, "vllm-cpu", "TTFT p50 ms"].rounds == pytest.approx([100, 300, 200])
    assert figures["1 requests/s", ALL, "vllm-cpu", "good share"].median == 0.75
    assert ("1 requests/s: ITL", ALL, "vllm-cpu", "ITL p50 ms") not in figures
