"""Predicts from fitted timing models and measured shares what a change would bring, or says why it cannot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from router.diagnosis.pool import DiagnosedPool

_SATURATED = 0.8
"""Busy share from which clients that wait for their answers are more likely than a load that comes regardless."""
_ENDLESS = 0.94
"""Busy share from which a queue has no end within a window: only clients that wait explain that pool."""
_SPREAD = 0.05
"""Doubt about a measured busy share, for the interval of a predicted wait."""
_FORMULA_ERROR = 0.2
"""Relative error of the formula for the wait of a queue with several workers."""
_UNEXPLAINED = 10.0
"""Multiple of the wait in a queue of the measured load beyond which something else than this pool is waited for."""
_FIT_ERROR = 0.05
"""Least relative error of a fitted step time."""
_POOR_FIT = 0.5
"""Relative error beyond which a fitted step time predicts nothing."""
_WEIGHT_BYTES = {"int8": 8.5 / 16, "int4": 5.0 / 16}
"""Bytes of a weight and its share of scales and offsets, as a multiple of bfloat16's."""
_MIN_REQUESTS = 8
"""Requests below which a mean has no interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFigure:
    """A figure as it is, and as it would be after a change."""

    change: str
    figure: str
    now: float
    expected: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedChange:
    """A change that would help."""

    text: str
    predicted: PredictedFigure | None = None
    """None where it cannot be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTimes:
    """Times of the prompts of some requests."""

    waits_s: Sequence[float]
    """Waits for prefill."""
    prefills_s: Sequence[float]
    """First chunk to first token."""
    alone_s: float
    """Time in steps that a prompt takes, in the mean: less than a prefill where several share steps."""


def one_more_reader(pool: DiagnosedPool, times: PromptTimes) -> SuggestedChange:
    """Return what another worker would do to the mean wait for prefill.

    It depends on the clients. Where requests come regardless of answers, the pool is a queue with the same load on more
    workers. Where each client waits for its answer, as many requests stay under way: together they wait and compute as
    before, at a rate that grows with the workers. A router cannot know which; in a pool that hardly pauses it is more
    likely the second. The interval holds both. Where its host has too few idle cores, the new worker takes them from
    others: the interval then reaches to the wait as it is, and that much less is expected.
    """
    num_workers, busy, wait_s = len(pool.workers), max(_SPREAD, pool.busy_share), fmean(times.waits_s)
    name = f"a {pool.name} worker more"
    opened = [
        wait_s * _wait(share * num_workers / (num_workers + 1), num_workers + 1) / _wait(share, num_workers)
        for share in (busy, max(_SPREAD, busy - _SPREAD), busy + _SPREAD)
        if busy < _ENDLESS
    ]
    closed = _closed_waits_s(num_workers, times)
    if busy < _SATURATED and wait_s > _UNEXPLAINED * _wait(busy, num_workers) * fmean(times.prefills_s):
        why = f"a pool that is busy {pool.busy_share:.0%} of the time does not explain a wait of {wait_s:.2g} s"
        return SuggestedChange(text=f"{name}: what it does to the wait cannot be predicted: {why}")
    if busy < _SATURATED:
        low, high = (1 - _FORMULA_ERROR) * min(opened), (1 + _FORMULA_ERROR) * max(opened)
        predicted = _prediction(pool, wait_s, opened[0], low, max(high, min(wait_s, closed[2])))
        return SuggestedChange(text=f"{name}: {_from_to(predicted)}{_cores(pool)}", predicted=predicted)
    where = ", if its host has room" if pool.spare is None else _cores(pool)
    more = f"{name}: {pool.spare_share / num_workers:.0%} more prompts per second{where}"
    if len(times.waits_s) < _MIN_REQUESTS:
        why = "a pool that hardly pauses has a queue without a mean, and too few requests show how its clients behave"
        return SuggestedChange(text=f"{more}; what it does to the wait cannot be predicted: {why}")
    low, expected, high = closed
    predicted = _prediction(pool, wait_s, expected, min([low, *opened]), high)
    return SuggestedChange(text=f"{more}; {_from_to(predicted)}", predicted=predicted)


def _closed_waits_s(num_workers: int, times: PromptTimes) -> tuple[float, float, float]:
    """Return the lowest, expected and highest mean wait with one worker more while as many requests are under way."""
    whole = [wait + prefill for wait, prefill in zip(times.waits_s, times.prefills_s, strict=True)]
    share, prefill_s = num_workers / (num_workers + 1), fmean(times.prefills_s)
    whole_s = share * fmean(whole)
    doubt_s = 2 * share * stdev(whole) / math.sqrt(len(whole)) if len(whole) > 1 else whole_s
    # Where prompts share steps now, each takes longer than alone; how much of that is left then is unknown.
    alone_s = min(prefill_s, times.alone_s)
    found = (whole_s - doubt_s - prefill_s, whole_s - (prefill_s + alone_s) / 2, whole_s + doubt_s - alone_s)
    low, expected, high = (max(0.0, each) for each in found)
    return low, expected, high


def _prediction(pool: DiagnosedPool, now: float, expected: float, low: float, high: float) -> PredictedFigure:
    share = pool.spare_share
    return PredictedFigure(
        change=f"{pool.name}_worker",
        figure="prefill_wait_s",
        now=now,
        expected=now + share * (expected - now),
        low=low,
        high=high if share == 1 else max(high, now),
    )


def _cores(pool: DiagnosedPool) -> str:
    """Return a remark on a host without idle cores for another worker; empty where it has them, or needs none."""
    if (spare := pool.spare) is None or spare.share == 1:
        return ""
    return f"; its host has {spare.num_idle:.1f} idle cores of the {spare.num_wanted:.1f} that it would use"


def _from_to(predicted: PredictedFigure) -> str:
    return (
        f"wait {predicted.now:.2g} s → about {predicted.expected:.2g} s ({predicted.low:.2g} to {predicted.high:.2g})"
    )


def _wait(busy_share: float, num_workers: int) -> float:
    """Return the mean wait in units of a service time (Sakasegawa, An approximation formula, 1977)."""
    return float(busy_share ** (math.sqrt(2 * (num_workers + 1)) - 1) / (num_workers * (1 - busy_share)))


def more_answers(pool: DiagnosedPool, instead: str) -> SuggestedChange:
    """Return what takes more answers where each worker has as many as it may; `instead`: what lets it have more."""
    return SuggestedChange(
        text=(
            f"a {pool.name} worker more: {pool.spare_share / len(pool.workers):.0%} more answers at the same pace"
            f"{_cores(pool)}; or {instead}"
        )
    )


def one_more_decoder(pool: DiagnosedPool, *, refills: bool = False) -> SuggestedChange:
    """Return what another decode worker would do to a step.

    `refills`: requests wait for room in a batch, so that it may be as large as before in the end.
    """
    num_workers, batch, context = len(pool.workers), pool.mean_batch, pool.mean_context
    after = batch * num_workers / (num_workers + 1)
    name = f"a {pool.name} worker more: batch {batch:.1f} → {after:.1f}"
    now, then = pool.decode_step_s(batch, context), pool.decode_step_s(after, context)
    if now is None or then is None:
        return SuggestedChange(
            text=f"{name}; its step time cannot be predicted yet: no worker has measured enough steps"
        )
    # The fitted model says how a step grows with its batch; what is measured, how long it takes now.
    measured_s = pool.mean_decode_step_s
    error = abs(measured_s - now[0]) / now[0]
    if error > _POOR_FIT:
        why = f"steps take {short_time(measured_s)} and their model says {short_time(now[0])}"
        return SuggestedChange(text=f"{name}; its step time cannot be predicted: {why}")
    expected, low, high = (measured_s * max(0.0, each) / now[0] for each in then)
    doubt_s = max(_FIT_ERROR, error) * expected
    low, high = max(0.0, low - doubt_s), high + doubt_s
    if (share := pool.spare_share) < 1:
        # Small batches were learned while others used the cores: all beyond memory may grow with the batch. With no
        # more cores than now, a step may also take longer by as much as there are more workers.
        ratio = after / batch
        beyond_s = max(0.0, measured_s - pool.decode_memory_s(1.0))
        low = min(low, ratio * beyond_s + min(measured_s, pool.decode_memory_s(ratio)))
        high = max(high, measured_s, expected * (num_workers + 1) / (num_workers + share))
    if refills:
        high = max(high, measured_s)
    predicted = PredictedFigure(
        change=f"{pool.name}_worker",
        figure="decode_step_s",
        now=measured_s,
        expected=expected,
        low=low,
        high=high,
    )
    return SuggestedChange(
        text=(
            f"{name}, a step {short_time(predicted.now)} → {short_time(expected)}"
            f" ({short_time(predicted.low)} to {short_time(predicted.high)} by worker and fit{_cores(pool)})"
        ),
        predicted=predicted,
    )


def fewer_weight_bits(pool: DiagnosedPool, reader: DiagnosedPool) -> SuggestedChange | None:
    """Return the most that int8 and int4 weights could save of a decode step.

    None where a worker of either pool has ranks, among which such weights cannot be cut.
    """
    if any(worker.status.num_ranks > 1 for worker in (*pool.workers, *reader.workers)):
        return None
    decode_s, weights_s = pool.total("decode_s"), pool.total("decode_weights_s")
    if not weights_s or not decode_s:
        return SuggestedChange(text="int8 or int4 weights: cannot tell, the workers have not measured their memory")
    share = min(1.0, weights_s / decode_s)
    savings = " and ".join(f"{name} at most {share * (1 - part):.0%}" for name, part in _WEIGHT_BYTES.items())
    return SuggestedChange(
        text=f"int8 or int4 weights: reading weights takes {share:.0%} of a decode step; {savings} less time"
    )


def speculation(pool: DiagnosedPool) -> SuggestedChange:
    """Return what drafts have brought."""
    num_drafted = sum(worker.status.num_drafted_tokens for worker in pool.workers)
    num_accepted = sum(worker.status.num_accepted_tokens for worker in pool.workers)
    if not num_drafted:
        return SuggestedChange(text="speculation: cannot tell, no token was drafted; model.speculation turns it on")
    right = num_accepted / num_drafted
    return SuggestedChange(text=f"speculation: {right:.0%} of {num_drafted} drafted tokens were right so far")


def larger_cache(evicted_share: float, saved_s: float, *, request_s: float) -> SuggestedChange:
    """Return what caches of about twice the size would save of the mean time of a request."""
    return SuggestedChange(
        text=(
            f"twice the pages (num_blocks, or kv_dtype int8 in the same memory): up to {evicted_share:.0%} of the"
            f" computed tokens found, up to {saved_s:.2g} s less for a request"
        ),
        predicted=PredictedFigure(
            change="pages",
            figure="request_s",
            now=request_s,
            expected=request_s - saved_s,
            low=request_s - saved_s,
            high=request_s,
        ),
    )


def other_split(reader: DiagnosedPool, decoder: DiagnosedPool) -> SuggestedChange | None:
    """Return which pool could give a worker to the other; None while both are about as busy."""
    for giver, taker in ((decoder, reader), (reader, decoder)):
        if len(giver.workers) > 1 and giver.busy_share < 0.5 * taker.busy_share:
            return SuggestedChange(
                text=(
                    f"another split: {giver.name} workers are busy {giver.busy_share:.0%} of the time,"
                    f" {taker.name} workers {taker.busy_share:.0%}; `kvrelay scale` or a flip moves one"
                )
            )
    return None


def short_time(seconds: float) -> str:
    """Return a time in milliseconds, or in seconds from one on."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
