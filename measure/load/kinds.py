"""What one kind of session got."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from common.slo import Slo
from measure.figures import summarize
from measure.load.estimates import Distribution, Estimate, Resampler
from measure.load.records import Outcome, RequestRecord
from measure.load.summary import CacheUse, KindSummary, Latencies, PredictionError


def summarize_kind(requests: Sequence[RequestRecord], *, kind: str, slo: Slo, duration_s: float) -> KindSummary:
    """Return what `requests` got: at least one, in the order in which they were due, in `duration_s`."""
    resampler = Resampler(len(requests))
    outcomes = Counter(request.outcome for request in requests)
    complete = [request for request in requests if request.is_complete]
    figures = summarize(requests, slo=slo)
    is_good = np.array([slo.is_good(request) for request in requests])
    good_share = resampler.share(is_good)
    num_pieces = sum(len(request.chunk_s) for request in complete)
    num_output_tokens = sum(request.num_output_tokens for request in complete)
    moved = [request.server.transfer_bytes for request in requests if request.server.transfer_bytes]
    return KindSummary(
        kind=kind,
        num_requests=figures.num_requests,
        num_complete=figures.num_complete,
        num_refused=outcomes[Outcome.REFUSED],
        num_failed=outcomes[Outcome.FAILED],
        num_timed_out=outcomes[Outcome.TIMED_OUT],
        num_cancelled=outcomes[Outcome.CANCELLED],
        num_good=figures.num_good,
        num_ttft_misses=figures.num_ttft_misses,
        num_itl_misses=figures.num_itl_misses,
        good_share=good_share,
        goodput_per_s=good_share.scaled(len(requests) / duration_s if duration_s > 0 else 0.0),
        latencies=_latencies(requests, resampler),
        mean_prompt_tokens=sum(request.num_prompt_tokens for request in requests) / len(requests),
        mean_output_tokens=num_output_tokens / len(complete) if complete else 0.0,
        tokens_per_piece=num_output_tokens / num_pieces if num_pieces else None,
        cache=_cache(requests, resampler),
        num_replans=sum(max(0, (request.server.num_attempts or 1) - 1) for request in requests),
        num_transfers=len(moved),
        transfer_bytes=sum(moved),
        prediction=_prediction(complete),
    )


def _latencies(requests: Sequence[RequestRecord], resampler: Resampler) -> Latencies:
    def over(measure: Callable[[RequestRecord], float | None]) -> Distribution | None:
        values = [
            (owner, value) for owner, r in enumerate(requests) if r.is_complete and (value := measure(r)) is not None
        ]
        owners = np.array([owner for owner, _ in values], dtype=np.int64)
        return resampler.distribution(np.array([value for _, value in values], dtype=np.float64), owners)

    return Latencies(
        ttft=over(lambda request: request.ttft_s),
        itl=_gaps(requests, resampler),
        tpot=over(lambda request: request.itl_s),
        e2e=over(lambda request: request.e2e_s),
        queue=over(lambda request: request.server.queue_s),
        prefill=over(lambda request: request.server.prefill_s),
        transfer=over(lambda request: request.server.transfer_s if request.server.transfer_bytes else None),
        transfer_exposed=over(
            lambda request: request.server.transfer_exposed_s if request.server.transfer_bytes else None
        ),
        lag=over(lambda request: request.lag_s),
    )


def _gaps(requests: Sequence[RequestRecord], resampler: Resampler) -> Distribution | None:
    gaps = [np.diff(request.chunk_s) if request.is_complete else np.empty(0) for request in requests]
    owners = np.repeat(np.arange(len(gaps)), [values.size for values in gaps])
    return resampler.distribution(np.concatenate(gaps), owners)


def _cache(requests: Sequence[RequestRecord], resampler: Resampler) -> CacheUse | None:
    """Return what was found, over the requests whose server says so."""
    told = np.array([request.server.num_cached_tokens is not None for request in requests])
    prompt = np.array([request.num_prompt_tokens for request in requests]) * told
    if not prompt.sum():
        return None
    cached = np.array([request.server.num_cached_tokens or 0 for request in requests])
    pulled = np.array([request.server.num_pulled_tokens or 0 for request in requests]) * told
    return CacheUse(
        hit_share=Estimate.of(resampler.ratios(cached.astype(np.float64), prompt.astype(np.float64))),
        pulled_share=float(pulled.sum() / prompt.sum()),
    )


def _prediction(complete: Sequence[RequestRecord]) -> PredictionError | None:
    errors = [
        request.server.ttft_s - request.server.predicted_ttft_s
        for request in complete
        if request.server.ttft_s is not None and request.server.predicted_ttft_s is not None
    ]
    if not errors:
        return None
    p90 = np.quantile(np.abs(errors), 0.9)
    return PredictionError(num_requests=len(errors), median_s=float(np.median(errors)), p90_abs_s=float(p90))
