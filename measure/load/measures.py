"""Summarizes the records of a run."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from common.slo import Slo
from measure import figures
from measure.load.estimates import Estimate, Floats, Ints, Resampler
from measure.load.records import Outcome, RequestRecord, Run, ServerReport
from measure.load.session_figures import STRETCH, session_figures
from measure.load.summary import CacheUse, FailureCount, KindSummary, Latencies, PredictionError, Summary, Throughput
from measure.load.window import Window, counted, find_window, steadiness
from measure.load.workers import peak_queued, summarize_workers, tokens_between
from measure.pages.wording import count

# Ids and numbers differ between failures that are the same.
_ID = re.compile(r"\b(?=[0-9a-f-]*\d)[0-9a-f]{8}[0-9a-f-]*\b")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_MAX_ERROR_CHARS = 200
_FEW_REQUESTS = 30
_MANY_TOKENS_PER_PIECE = 1.05
_MIN_ARRIVAL_GROWTH = 1.2


def summarize(
    run: Run,
    *,
    slo: Slo,
    warm_up_s: float | None = None,
    cool_down_s: float | None = None,
    stretch: float = STRETCH,
) -> Summary:
    """Return the figures of a run under `slo`, and of its sessions under a stretch.

    Requests due in the first `warm_up_s` (None: a tenth of the arrivals) and the last `cool_down_s` (None: after the
    last session began) do not count, see `measure.load.window`. Raises NothingMeasured when no request counts.
    """
    window = find_window(run.requests, warm_up_s=warm_up_s, cool_down_s=cool_down_s)
    requests = counted(run.requests, window)
    pools, workers = summarize_workers(run, requests, window)
    summary = Summary(
        info=run.info,
        slo=slo,
        window=window,
        kinds=_kinds(requests, slo, window),
        throughput=_throughput(run.requests, window),
        pools=pools,
        workers=workers,
        peak_queued=peak_queued(run.samples, window),
        failures=_failures(requests),
        steadiness=steadiness(run.requests, start_s=window.start_s, end_s=window.end_s),
        sessions=session_figures(run.requests, window, stretch=stretch),
    )
    return dataclasses.replace(summary, warnings=_cautions(summary))


def _kinds(requests: Sequence[RequestRecord], slo: Slo, window: Window) -> tuple[KindSummary, ...]:
    (everything, _), *kinds = figures.by_kind(requests).items()
    overall = _summarize_kind(requests, kind=everything, slo=slo, duration_s=window.duration_s)
    if len(kinds) == 1:  # which has the same requests
        return overall, dataclasses.replace(overall, kind=kinds[0][0])
    return overall, *(_summarize_kind(own, kind=kind, slo=slo, duration_s=window.duration_s) for kind, own in kinds)


def _throughput(requests: Sequence[RequestRecord], window: Window) -> Throughput:
    start_s, end_s = window.start_s, window.rates_end_s
    begun = [r for r in requests if r.first_token_s is not None and start_s <= r.first_token_s <= end_s]
    num_completed = sum(request.is_complete and start_s <= request.end_s <= end_s for request in requests)
    num_output_tokens = sum(tokens_between(request, start_s, end_s) for request in requests)
    per_s = 1 / window.duration_s if window.duration_s > 0 else 0.0
    return Throughput(
        offered_per_s=window.num_counted * per_s,
        completed_per_s=num_completed * per_s,
        prompt_tokens_per_s=sum(request.num_prompt_tokens for request in begun) * per_s,
        output_tokens_per_s=num_output_tokens * per_s,
    )


def _failures(requests: Sequence[RequestRecord]) -> tuple[FailureCount, ...]:
    alike: dict[tuple[Outcome, str], list[RequestRecord]] = {}
    for request in requests:
        if not request.is_complete:
            what = _NUMBER.sub("", _ID.sub("", request.error))
            alike.setdefault((request.outcome, what), []).append(request)
    return tuple(
        FailureCount(outcome=outcome.value, error=same[0].error[:_MAX_ERROR_CHARS], num_requests=len(same))
        for (outcome, _), same in sorted(alike.items(), key=lambda item: -len(item[1]))
    )


def _summarize_kind(requests: Sequence[RequestRecord], *, kind: str, slo: Slo, duration_s: float) -> KindSummary:
    """Return the figures of `requests`, one at least, in the order in which they were due, over `duration_s`."""
    resampler = Resampler(len(requests))
    outcomes = Counter(request.outcome for request in requests)
    complete = [request for request in requests if request.is_complete]
    counts = figures.summarize(requests, slo=slo)
    is_good = np.array([slo.is_good(request) for request in requests])
    good_share = resampler.share(is_good)
    num_pieces = sum(len(request.chunk_s) for request in complete)
    num_output_tokens = sum(request.num_output_tokens for request in complete)
    moved = [request.server.transfer_bytes for request in requests if request.server.transfer_bytes]
    return KindSummary(
        kind=kind,
        num_requests=counts.num_requests,
        num_complete=counts.num_complete,
        num_refused=outcomes[Outcome.REFUSED],
        num_failed=outcomes[Outcome.FAILED],
        num_timed_out=outcomes[Outcome.TIMED_OUT],
        num_cancelled=outcomes[Outcome.CANCELLED],
        num_good=counts.num_good,
        num_ttft_misses=counts.num_ttft_misses,
        num_tpot_misses=counts.num_tpot_misses,
        good_share=good_share,
        goodput_per_s=good_share.scaled(len(requests) / duration_s if duration_s > 0 else 0.0),
        latencies=Latencies(**{name: resampler.distribution(*latency_values(name, requests)) for name in _LATENCIES}),
        mean_prompt_tokens=sum(request.num_prompt_tokens for request in requests) / len(requests),
        mean_output_tokens=num_output_tokens / len(complete) if complete else 0.0,
        tokens_per_piece=num_output_tokens / num_pieces if num_pieces else None,
        cache=_cache(requests, resampler),
        num_replans=sum(max(0, (request.server.num_attempts or 1) - 1) for request in requests),
        num_transfers=len(moved),
        transfer_bytes=sum(moved),
        prediction=_prediction(complete),
    )


_LATENCIES: dict[str, Callable[[RequestRecord], Sequence[float | None] | Floats]] = {
    "ttft": lambda request: [request.ttft_s],
    "itl": lambda request: np.diff(request.chunk_s),
    "tpot": lambda request: [request.tpot_s],
    "e2e": lambda request: [request.e2e_s],
    "queue": lambda request: [request.server.queue_s],
    "prefill": lambda request: [request.server.prefill_s],
    "transfer": lambda request: [request.server.transfer_s if request.server.transfer_bytes else None],
    "transfer_exposed": lambda request: [request.server.transfer_exposed_s if request.server.transfer_bytes else None],
    "lag": lambda request: [request.lag_s],
}
"""Values of one complete request, by field of `Latencies`."""


def latency_values(name: str, requests: Sequence[RequestRecord]) -> tuple[Floats, Ints]:
    """Return the values of a latency over the complete requests, and the index of the request of each value."""
    found = [np.array(_LATENCIES[name](r) if r.is_complete else (), dtype=np.float64) for r in requests]
    values, owners = np.concatenate(found), np.repeat(np.arange(len(found)), [each.size for each in found])
    is_known = ~np.isnan(values)
    return values[is_known], owners[is_known]


def _cache(requests: Sequence[RequestRecord], resampler: Resampler) -> CacheUse | None:
    """Return the cache use over the requests whose server reports it."""
    is_reported = np.array([request.server.num_cached_tokens is not None for request in requests])
    prompt = np.array([request.num_prompt_tokens for request in requests]) * is_reported
    if not prompt.sum():
        return None
    cached = np.array([request.server.num_cached_tokens or 0 for request in requests])
    pulled = np.array([request.server.num_pulled_tokens or 0 for request in requests]) * is_reported
    return CacheUse(
        hit_share=Estimate.of(resampler.ratios(cached.astype(np.float64), prompt.astype(np.float64))),
        pulled_share=float(pulled.sum() / prompt.sum()),
    )


def _prediction(complete: Sequence[RequestRecord]) -> PredictionError | None:
    errors = [
        request.server.ttft_s - forecast_s
        for request in complete
        if request.server.ttft_s is not None and (forecast_s := _forecast_ttft_s(request.server)) is not None
    ]
    if not errors:
        return None
    p90 = np.quantile(np.abs(errors), 0.9)
    return PredictionError(num_requests=len(errors), median_s=float(np.median(errors)), p90_abs_s=float(p90))


def _forecast_ttft_s(report: ServerReport) -> float | None:
    """Return the forecast that includes the wait in line; of a server without it, the one from the choice on."""
    return report.predicted_ttft_s if report.ttft_forecast is None else report.ttft_forecast.expected_s


def _cautions(summary: Summary) -> tuple[str, ...]:
    """Return the warnings of a summary, the gravest first."""
    info = summary.info
    return (*info.generator.warnings, *_of_load(summary), *_of_requests(summary.overall), *info.notes)


def _of_load(summary: Summary) -> Iterator[str]:
    steady = summary.steadiness
    if not steady.is_steady and steady.e2e_growth is not None:
        yield (
            f"unstable: open requests grew from {steady.backlog_early:.0f} to {steady.backlog_late:.0f}, and answers"
            f" took {steady.e2e_growth.value:.1f} times as long at the end as at the beginning; the load is above"
            " capacity, and a longer run would show longer latencies"
        )
        if steady.arrival_growth >= _MIN_ARRIVAL_GROWTH:
            yield f"the load itself grew {steady.arrival_growth:.1f}-fold: capacity lies between its ends"
    window = summary.window
    if window.rates_end_s > window.end_s:
        yield (
            "requests arrived for a shorter time than answers take, so rates extend to the last answer;"
            " a longer run would show higher rates"
        )


def _of_requests(overall: KindSummary) -> Iterator[str]:
    if overall.num_requests < _FEW_REQUESTS:
        yield f"only {count(overall.num_requests, 'request')} counted: intervals are rough"
    if overall.num_cancelled:
        yield "requests cancelled by the load test count as not good; --cool-down SECONDS leaves out the last requests"
    if overall.tokens_per_piece is not None and overall.tokens_per_piece > _MANY_TOKENS_PER_PIECE:
        yield (
            f"a piece of an answer holds {overall.tokens_per_piece:.2f} tokens on average, and ITL is the gap between"
            " pieces; compare systems by TPOT"
        )
