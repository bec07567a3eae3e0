"""Makes a summary of a run's records."""

import dataclasses
import re
from collections.abc import Sequence

from common.slo import Slo
from measure.figures import by_kind
from measure.load.cautions import cautions
from measure.load.kinds import summarize_kind
from measure.load.records import Outcome, RequestRecord, Run
from measure.load.steadiness import steadiness
from measure.load.summary import FailureCount, KindSummary, Summary, Throughput, Window
from measure.load.window import counted, find_window
from measure.load.workers import peak_queued, summarize_workers, tokens_between

# Ids and numbers differ between failures that are the same.
_ID = re.compile(r"\b(?=[0-9a-f-]*\d)[0-9a-f]{8}[0-9a-f-]*\b")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_MAX_ERROR_CHARS = 200


def summarize(run: Run, *, slo: Slo, warm_up_s: float | None = None, cool_down_s: float | None = None) -> Summary:
    """Return what a run was worth under `slo`.

    Requests that were due in the first `warm_up_s` (None: a tenth of the arrivals) and the last `cool_down_s` (None:
    after the last session began) are left out, see `measure.load.window`. Raises NothingMeasured when no request is
    left.
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
    )
    return dataclasses.replace(summary, warnings=cautions(summary))


def _kinds(requests: Sequence[RequestRecord], slo: Slo, window: Window) -> tuple[KindSummary, ...]:
    groups = by_kind(requests)
    duration_s = window.duration_s
    overall, *kinds = (summarize_kind(own, kind=kind, slo=slo, duration_s=duration_s) for kind, own in groups.items())
    return overall, *kinds


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
