"""Figures of a simulated run: those of every run, and what only a simulation knows of its workers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from common.slo import Slo
from kvrelay.client.events import Forecast
from measure.figures import Figures, Percentiles, percentiles, summarize
from measure.load.records import RequestRecord
from measure.simulate.records import SimRun, WorkerResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastCheck:
    """Forecasts of a duration beside the outcomes, over the complete requests that have both."""

    num_requests: int
    median_error: float
    """Median of |forecast / outcome - 1|."""
    held_share: float | None
    """Share of the outcomes within their interval, of those that have one; 0.8 is right. None without intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSummary:
    """Figures of a run. A cached token is a prompt token that the computing worker did not compute, or pulled."""

    figures: Figures
    goodput_per_s: float
    """Good requests per second of arrivals."""
    token_hit: float
    """Cached tokens of all prompt tokens of complete requests."""
    pulled_share: float
    """Pulled tokens of the same prompt tokens."""
    hot_spot: float
    """Workers that compute prompts times the largest share of computed tokens of one of them; 1 is even."""
    num_transfers: int
    """Requests whose KV, or a part of it, moved between workers."""
    transfer_bytes: int
    prefill_busy: float | None
    """Share of the run that prefill workers computed; None without prefill workers."""
    decode_busy: float
    """Share of the run that decode workers, aggregated ones included, computed."""
    num_preemptions: int
    predicted_hit_error: float
    """Mean of |predicted - actual| cached tokens, as a share of the prompt tokens."""
    end_s: float
    """Time at which the last request had ended."""
    line_ttft_forecast: ForecastCheck | None = None
    """TTFT forecasts made when requests entered the line; None when none waited."""
    ttft_forecast: ForecastCheck | None = None
    """TTFT forecasts made at the choice of a plan; None for policies that predict no times."""
    tpot_forecast: ForecastCheck | None = None
    """Forecasts of TPOT, made at the choice of a plan; None as above."""


def summarize_run(run: SimRun, *, slo: Slo, num_prefill: int) -> SimulationSummary:
    """Return the figures of a run. The hot spot is that of the prefill workers, if there are any, else of all."""
    requests = run.requests
    complete = [request for request in requests if request.is_complete]
    figures = summarize(requests, slo=slo, itl=gap_percentiles(requests))
    duration_s = requests[-1].due_s - requests[0].due_s if requests else 0.0
    num_prompt_tokens = sum(request.num_prompt_tokens for request in complete)
    transfers = [moved for request in requests if (moved := request.server.transfer_bytes)]
    prefill = [worker for worker in run.workers if worker.is_prefill]
    decode = [worker for worker in run.workers if not worker.is_prefill]
    return SimulationSummary(
        figures=figures,
        goodput_per_s=figures.num_good / duration_s if duration_s else 0.0,
        token_hit=_share(sum(map(count_cached_tokens, complete)), num_prompt_tokens),
        pulled_share=_share(sum(request.server.num_pulled_tokens or 0 for request in complete), num_prompt_tokens),
        hot_spot=hot_spot(requests, num_workers=num_prefill or len(run.workers)),
        num_transfers=len(transfers),
        transfer_bytes=sum(transfers),
        prefill_busy=_busy(prefill, run.end_s) if prefill else None,
        decode_busy=_busy(decode, run.end_s),
        num_preemptions=sum(worker.num_preemptions for worker in run.workers),
        predicted_hit_error=_share(
            sum(
                abs((request.server.predicted_cached_tokens or 0) - count_cached_tokens(request))
                for request in complete
            ),
            num_prompt_tokens,
        ),
        end_s=run.end_s,
        line_ttft_forecast=check_forecasts((each.server.line_ttft_forecast, each.server.ttft_s) for each in complete),
        ttft_forecast=check_forecasts((each.server.ttft_forecast, each.server.ttft_s) for each in complete),
        tpot_forecast=check_forecasts((each.server.tpot_forecast, each.tpot_s) for each in complete),
    )


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


def _busy(workers: Sequence[WorkerResult], end_s: float) -> float:
    return _share(sum(worker.busy_s for worker in workers), len(workers) * end_s)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
