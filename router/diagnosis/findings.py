"""Causes of lost time in order, each with its numbers and the changes that would help.

A request loses the time that it would not spend in an idle cluster whose caches forget nothing: the wait for prefill,
the computation of evicted prefixes, transfers that it waits for, and the part of each decode step that other sequences
or a slow worker add. The wait for prefill is charged to what fills the pool: evicted prefixes first, then the tenant
that asks for most of the rest, then the load as such. Faults come before walls: they are mended, not paid for.
"""

from common.wire_names import TRANSPORT_NAMES
from router.diagnosis import changes
from router.diagnosis.changes import SuggestedChange, short_time
from router.diagnosis.finding import (
    Cause,
    DiagnosisFinding,
    DiagnosisInput,
    describe_walls,
    mean,
    mean_wait_s,
    mean_whole_s,
)
from router.diagnosis.pool import DiagnosedPool
from router.diagnosis.tail import tail
from router.diagnosis.waits import line_waits, prefill_waits
from router.placement.waits import WaitCause

_MIN_SHARE = 0.03
"""Share of a request's whole time below which a loss is not worth a sentence."""
_LOOK_AT_HOST = "look for other load, heat or swapping on its host; it is replaced when it stays slow"
_FEWER_PROMPTS = "fewer prompts on decode workers (router.local_prefill_max_tokens), fewer processes on its host"
_FAULTS = frozenset({Cause.SLOW_WORKER})


def find(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return the causes, the most important one first; none when nothing costs much."""
    if not view.in_line:
        return []
    whole_s = mean_whole_s(view.in_line)
    # Without any answer, nothing is known of what follows the line.
    answered = (_slow_workers, prefill_waits, _transfers, _decode_steps, tail) if view.requests else ()
    kinds = (line_waits, *answered)
    worth = [
        each for kind in kinds for each in kind(view) if each.lost_s >= _MIN_SHARE * whole_s or each.cause in _FAULTS
    ]
    return sorted(worth, key=lambda each: (each.cause not in _FAULTS, -each.lost_s))


def _slow_workers(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return a finding for each worker that is several times slower than its pool."""
    prefill_s = mean(view.requests, lambda each: each.prefill_s)
    decode_s = mean(view.requests, lambda each: each.decode_s)
    if view.reader is view.decoder:
        times = [(view.reader, prefill_s + decode_s)]
    else:
        times = [(view.reader, prefill_s), (view.decoder, decode_s)]
    return [
        DiagnosisFinding(
            cause=Cause.SLOW_WORKER,
            pool=pool.name,
            lost_s=time_s * (1 - 1 / slowness) / len(pool.workers),
            text=f"steps of {worker_id} take {slowness:.1f} times as long as those of the other {pool.name} workers",
            options=(SuggestedChange(text=_LOOK_AT_HOST),),
        )
        for pool, time_s in times
        for worker_id, slowness in pool.slow_workers.items()
    ]


def _transfers(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return the time that first tokens wait for KV after their prefill."""
    exposed_s = mean(view.requests, lambda each: each.transfer_exposed_s)
    text = f"decode waits {exposed_s:.2g} s for KV blocks after the prefill has ended{_links(view.decoder)}"
    more = (
        SuggestedChange(
            text="transfer.transports: shm where both workers share a host; kv_dtype int8 halves the bytes"
        ),
    )
    return [DiagnosisFinding(cause=Cause.TRANSFER, pool="decode", lost_s=exposed_s, text=text, options=more)]


def _links(pool: DiagnosedPool) -> str:
    """Return what its slowest pulls reach, beside the most that their transport moves; empty where not known."""
    if (link := pool.slowest_link) is None:
        return ""
    share = link.bytes_per_s / link.most_bytes_per_s
    return (
        f"; pulls from {link.peer_worker_id} by {TRANSPORT_NAMES[link.transport]} reach"
        f" {link.bytes_per_s / 1e9:.2g} GB/s, {share:.0%} of what that moves between pages of one host"
    )


def _decode_steps(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return the part of each gap between tokens that other sequences of a step add, and the part outside steps."""
    pool = view.decoder
    gaps = [each for each in view.requests if each.tpot_s is not None]
    tpot_s = mean(gaps, lambda each: each.tpot_s or 0.0) if gaps else 0.0
    if not tpot_s or not pool.mean_batch:  # no gap is known when all tokens of an answer come at once
        return []
    alone = pool.decode_step_s(1.0, pool.mean_context)
    alone_s = pool.mean_decode_step_s if alone is None else alone[0]
    step_s = min(tpot_s, max(alone_s, pool.mean_decode_step_s))
    lone = "not known yet" if alone is None else short_time(alone_s)
    decode_s = mean(view.requests, lambda each: each.decode_s)
    preempted = sum(worker.status.num_preemptions for worker in pool.workers)
    options = [
        changes.one_more_decoder(pool, refills=_is_awaited(view)),
        changes.fewer_weight_bits(pool, view.reader),
        changes.speculation(pool),
    ]
    return [
        DiagnosisFinding(
            cause=Cause.DECODE,
            pool=pool.name,
            lost_s=max(0.0, (step_s - alone_s) / tpot_s) * decode_s,
            text=(
                f"a decode step takes {short_time(step_s)}, {lone} for a sequence alone: batches of"
                f" {pool.mean_batch:.1f} with {pool.mean_context:.0f} KV tokens each{describe_walls(pool)}"
            ),
            options=tuple(each for each in options if each is not None),
        ),
        DiagnosisFinding(
            cause=Cause.DECODE_STALLS,
            pool=pool.name,
            lost_s=(tpot_s - step_s) / tpot_s * decode_s,
            text=(
                f"a gap between tokens is {short_time(tpot_s)}, and a decode step {short_time(step_s)}: answers wait"
                f" between steps, for prompts that are computed in between, for their KV, or for the host"
                + (f"; {preempted} preemptions since the start" if preempted else "")
            ),
            options=(SuggestedChange(text=_FEWER_PROMPTS),),
        ),
    ]


def _is_awaited(view: DiagnosisInput) -> bool:
    """Return whether requests wait for decode workers, so that each gap that one leaves is filled."""
    wait_s = mean_wait_s(view.in_line, WaitCause.DECODE_ROOM) + mean_wait_s(view.in_line, WaitCause.DECODE_PACE)
    return wait_s >= _MIN_SHARE * mean_whole_s(view.in_line)
