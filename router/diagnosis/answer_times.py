"""The times of answers in words: those of a window, and one request's by its parts beside the usual ones."""

from collections.abc import Callable, Sequence
from statistics import fmean, median

import numpy as np

from common.slo import Slo
from router.diagnosis.changes import short_time
from router.observe.recent_requests import RecentRequest, most_awaited

_LINE = "in the router's line"
_PARTS: Sequence[tuple[str, Callable[[RecentRequest], float]]] = (
    (_LINE, lambda each: each.line_s),
    ("queued at the worker", lambda each: each.worker_queue_s),
    ("prefill", lambda each: each.prefill_s),
    ("KV transfer after prefill", lambda each: each.transfer_exposed_s),
    ("elsewhere until the first token", lambda each: _rest_s(each)),
    ("first to last token", lambda each: each.decode_s),
)


def headline(requests: Sequence[RecentRequest], *, window_s: float, slo: Slo | None, num_running: int = 0) -> str:
    """Return how the requests of a window did; `num_running` are not answered yet."""
    if not requests:
        under_way = f"; {num_running} under way" if num_running else ""
        return f"no request was answered in the last {window_s:g} s{under_way}"
    ttft_p50, ttft_p99 = np.percentile([each.ttft_s for each in requests], (50, 99))
    count = "1 request" if len(requests) == 1 else f"{len(requests)} requests"
    text = f"{count} answered in {window_s:g} s: TTFT p50 {ttft_p50:.3g} s, p99 {ttft_p99:.3g} s"
    gaps = [each.tpot_s for each in requests if each.tpot_s is not None]
    if gaps:
        tpot_p50, tpot_p99 = np.percentile(gaps, (50, 99))
        text += f", TPOT p50 {short_time(tpot_p50)}, p99 {short_time(tpot_p99)}"
    if slo is not None:
        text += f"; {fmean(map(slo.is_good, requests)):.0%} within their objectives"
    return text


def describe(request: RecentRequest, others: Sequence[RecentRequest]) -> tuple[str, list[str]]:
    """Return a headline, and a sentence for each part of its time, the longest first."""
    headline = (
        f"{request.request_id}: {request.whole_s:.3g} s in all, first token after"
        f" {request.ttft_s:.3g} s; {request.num_computed_tokens} of {request.num_prompt_tokens} prompt tokens computed,"
        f" {request.num_output_tokens} tokens answered"
    )
    if request.num_evicted_tokens:
        headline += f"; {request.num_evicted_tokens} of the computed tokens had been cached and were evicted"
    if request.num_attempts > 1:
        headline += f"; planned {request.num_attempts} times"
    parts = sorted(_PARTS, key=lambda part: -part[1](request))
    return headline, [_sentence(name, read, request, others) for name, read in parts if read(request) > 0]


def _sentence(
    name: str, read: Callable[[RecentRequest], float], request: RecentRequest, others: Sequence[RecentRequest]
) -> str:
    usual = f", usually {median(map(read, others)):.3g} s" if others else ""
    return f"{name}: {read(request):.3g} s{usual}{most_awaited([request]) if name is _LINE else ''}"


def _rest_s(request: RecentRequest) -> float:
    return max(0.0, request.ttft_s - request.queue_s - request.prefill_s - request.transfer_exposed_s)
