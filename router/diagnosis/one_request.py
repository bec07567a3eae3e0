"""Explains the time that one request took by its parts, beside the usual ones."""

from collections.abc import Callable, Sequence
from statistics import median

from router.diagnosis.recent_requests import RecentRequest

_PARTS: Sequence[tuple[str, Callable[[RecentRequest], float]]] = (
    ("in the router's line", lambda each: each.line_s),
    ("queued at the worker", lambda each: each.worker_queue_s),
    ("prefill", lambda each: each.prefill_s),
    ("KV transfer after prefill", lambda each: each.transfer_exposed_s),
    ("elsewhere until the first token", lambda each: _rest_s(each)),
    ("first to last token", lambda each: each.decode_s),
)


def describe(request: RecentRequest, others: Sequence[RecentRequest]) -> tuple[str, list[str]]:
    """Return a headline, and a sentence for each part of its time, the longest first."""
    headline = (
        f"{request.request_id}: {request.ttft_s + request.decode_s:.3g} s in all, first token after"
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
    return f"{name}: {read(request):.3g} s{usual}"


def _rest_s(request: RecentRequest) -> float:
    return max(0.0, request.ttft_s - request.queue_s - request.prefill_s - request.transfer_exposed_s)
