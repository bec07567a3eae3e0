"""Figures of served requests: forecasts beside outcomes, gaps between tokens, and how even prompts were spread."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.client.events import Forecast
from measure.figures import Percentiles, percentiles
from measure.load.records import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastCheck:
    """Forecasts of a duration beside the outcomes, over the complete requests that have both."""

    num_requests: int
    median_error: float
    """Median of |forecast / outcome - 1|."""
    held_share: float | None
    """Share of the outcomes within their interval, of those that have one; 0.8 is right. None without intervals."""


def check_forecasts(pairs: Iterable[tuple[Forecast | None, float | None]]) -> ForecastCheck | None:
    """Compare forecasts with outcomes; None when no request has both."""
    known = [(forecast, outcome_s) for forecast, outcome_s in pairs if forecast is not None and outcome_s]
    if not known:
        return None
    errors = [abs(forecast.expected_s / outcome_s - 1) for forecast, outcome_s in known]
    held = [
        forecast.low_s <= outcome_s <= forecast.high_s
        for forecast, outcome_s in known
        if forecast.low_s is not None and forecast.high_s is not None
    ]
    return ForecastCheck(
        num_requests=len(known),
        median_error=float(np.median(errors)),
        held_share=sum(held) / len(held) if held else None,
    )


def gap_percentiles(requests: Iterable[RequestRecord]) -> Percentiles | None:
    """Return the percentiles of gaps between pieces of complete answers, in whole microseconds; None without any."""
    gaps = [np.diff(request.chunk_s) for request in requests if request.is_complete]
    if not gaps:
        return None
    values, counts = np.unique(np.concatenate(gaps).round(6), return_counts=True)  # far fewer than gaps
    return percentiles(values.tolist(), counts.tolist())


def count_cached_tokens(request: RequestRecord) -> int:
    """Return the cached tokens of a prompt; 0 where none are reported."""
    return request.server.num_cached_tokens or 0


def hot_spot(requests: Sequence[RequestRecord], *, num_workers: int) -> float:
    """Return the number of workers times the largest worker's share of the computed prompt tokens.

    Prefill workers alone count if there are any in the plans: decode workers then compute only suffixes. 1 when nothing
    was computed.
    """
    computed: Counter[str] = Counter()
    is_remote = any(request.server.prefill_worker for request in requests)
    for request in requests:
        worker = request.server.prefill_worker if is_remote else request.server.decode_worker
        if worker:
            computed[worker] += request.num_prompt_tokens - count_cached_tokens(request)
    total = computed.total()
    return num_workers * max(computed.values()) / total if total else 1.0
