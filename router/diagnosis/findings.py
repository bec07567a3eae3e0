"""Causes of lost time in order, each with its numbers and the changes that would help.

A request loses the time that it would not spend in an idle cluster whose caches forget nothing: the wait for prefill,
the computation of evicted prefixes, transfers that it waits for, and the part of each decode step that other sequences
or a slow worker add. The wait for prefill is charged to what fills the pool: evicted prefixes first, then the tenant
that asks for most of the rest, then the load as such. Faults come before walls: they are mended, not paid for.
"""

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from common.wire_names import TRANSPORT_NAMES
from router.admission.waits import Wait
from router.diagnosis import changes
from router.diagnosis.changes import PredictedFigure, PromptTimes, SuggestedChange, short_time
from router.diagnosis.pool import DiagnosedPool
from router.diagnosis.recent_requests import RecentRequest
from router.diagnosis.tail import Terms, tail_of
from router.hot_prefixes import ReportedPrefix

_HOT_SHARE = 0.6
"""Share of the computed tokens from which a tenant counts as the cause of a wait."""
_MIN_SHARE = 0.03
"""Share of a request's whole time below which a loss is not worth a sentence."""
_LOOK_AT_HOST = "look for other load, heat or swapping on its host; it is replaced when it stays slow"
_FEWER_PROMPTS = "fewer prompts on decode workers (router.local_prefill_max_tokens), fewer processes on its host"
_NUM_LOST = 3
"""Prefixes that a sentence names."""
_LONGER_GAPS = "a longer slo.tpot_s: larger batches"
_MORE_ROOM = "more room on each (max_running; num_blocks, kv_dtype int8): larger batches, with longer steps"
_LOOK_AT_WORKERS = "`kvrelay status` shows which workers are ready, `kvrelay logs` why one was not"


class Cause(enum.Enum):
    """A cause of lost time."""

    SLOW_WORKER = "slow_worker"
    HOT_TENANT = "hot_tenant"
    CACHE_EVICTIONS = "cache_evictions"
    PREFILL = "prefill"
    DECODE_PACE = "decode_pace"
    DECODE_ROOM = "decode_room"
    TENANT_LIMIT = "tenant_limit"
    NO_WORKER = "no_worker"
    TRANSFER = "transfer"
    DECODE = "decode"
    DECODE_STALLS = "decode_stalls"
    TAIL = "tail"


_FAULTS = frozenset({Cause.SLOW_WORKER})


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisFinding:
    """One cause of lost time."""

    cause: Cause
    pool: str
    """The pool that it concerns."""
    lost_s: float
    """Time that a request loses by it, in the mean."""
    text: str
    options: tuple[SuggestedChange, ...] = ()
    """Changes that would help, with what each would bring."""

    @property
    def changes(self) -> tuple[str, ...]:
        """Those changes in sentences."""
        return tuple(each.text for each in self.options)

    @property
    def predictions(self) -> tuple[PredictedFigure, ...]:
        """The figures in those sentences."""
        return tuple(each.predicted for each in self.options if each.predicted is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisInput:
    """A router's knowledge of the last minutes."""

    requests: Sequence[RecentRequest]
    reader: DiagnosedPool
    """The pool that computes prompts."""
    decoder: DiagnosedPool
    """The pool that decodes; the same one where a single pool does both."""
    prefixes: Sequence[ReportedPrefix] = ()
    """Prefixes that are asked for most often, hottest first."""
    terms: Terms = lambda _requests: {}


def find(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return the causes, the most important one first; none when nothing costs much."""
    if not view.requests:
        return []
    whole_s = _whole_s(view.requests)
    kinds = (_slow_workers, _line, _waits, _transfers, _decode_steps, _tail)
    worth = [
        each for kind in kinds for each in kind(view) if each.lost_s >= _MIN_SHARE * whole_s or each.cause in _FAULTS
    ]
    return sorted(worth, key=lambda each: (each.cause not in _FAULTS, -each.lost_s))


def _line(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return the waits in line for anything but prefill."""
    pool = view.decoder
    room = f"batches are of {pool.mean_batch:.1f}, and answers hold {pool.used_page_share:.0%} of the pages"
    pace = f"with another one in a batch of {pool.mean_batch:.1f}, gaps between tokens would miss their objective"
    worker_s = _wait_s(view.requests, Wait.WORKER)
    return [
        _decode_wall(view, Wait.DECODE_ROOM, f"a slot and pages: {room}", instead=_MORE_ROOM),
        _decode_wall(view, Wait.DECODE_PACE, f"the pace of answers: {pace} (slo.tpot_s)", instead=_LONGER_GAPS),
        _tenant_limit(view),
        DiagnosisFinding(
            cause=Cause.NO_WORKER,
            pool="",
            lost_s=worker_s,
            text=(
                f"requests wait {worker_s:.2g} s in line for a worker: those of a pool were starting or lost, or had"
                " refused the request"
            ),
            options=(SuggestedChange(text=_LOOK_AT_WORKERS),),
        ),
    ]


def _decode_wall(view: DiagnosisInput, wait: Wait, what: str, *, instead: str) -> DiagnosisFinding:
    pool, wait_s = view.decoder, _wait_s(view.requests, wait)
    options = [
        changes.more_answers(pool, instead),
        changes.fewer_weight_bits(pool),
        changes.other_split(view.reader, pool),
    ]
    return DiagnosisFinding(
        cause=Cause(wait.value),
        pool=pool.name,
        lost_s=wait_s,
        text=(
            f"requests wait {wait_s:.2g} s in line for {what}; {pool.name} workers are busy {pool.busy_share:.0%} of"
            " the time"
        ),
        options=tuple(each for each in options if each is not None),
    )


def _tenant_limit(view: DiagnosisInput) -> DiagnosisFinding:
    """Return the wait of requests behind others of their tenants, with the tenant that waits most."""
    waits_s: defaultdict[str, float] = defaultdict(float)
    for each in view.requests:
        waits_s[each.tenant] += each.waits[Wait.TENANT_LIMIT]
    tenant = max(waits_s, key=lambda name: waits_s[name])
    own_s = _wait_s([each for each in view.requests if each.tenant == tenant], Wait.TENANT_LIMIT)
    return DiagnosisFinding(
        cause=Cause.TENANT_LIMIT,
        pool="",
        lost_s=_wait_s(view.requests, Wait.TENANT_LIMIT),
        text=(
            f"requests of tenant {tenant} wait {own_s:.2g} s in line for each other: as many as its max_concurrent"
            " allows are served, whatever workers could take"
        ),
        options=(SuggestedChange(text=f"a higher max_concurrent for tenant {tenant}"),),
    )


def _waits(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return the causes of waits for prefill, and of prefills that a cache should have saved."""
    requests, reader = view.requests, view.reader
    wait_s, prefill_s = _mean(requests, lambda each: each.prefill_wait_s), _mean(requests, lambda each: each.prefill_s)
    num_computed = sum(each.num_computed_tokens for each in requests)
    num_evicted = sum(each.num_evicted_tokens for each in requests)
    evicted = num_evicted / num_computed if num_computed else 0.0
    saved_s = evicted * (wait_s + prefill_s)
    found = [
        DiagnosisFinding(
            cause=Cause.CACHE_EVICTIONS,
            pool=reader.name,
            lost_s=saved_s,
            text=(
                f"{evicted:.0%} of the computed prompt tokens had been cached and were evicted before they were asked"
                f" for again; pages are {reader.page_share:.0%} full{_lost_prefixes(view.prefixes)}"
            ),
            options=(changes.larger_cache(evicted, saved_s, request_s=_whole_s(requests)),),
        )
    ]
    rest_s = (1 - evicted) * wait_s
    if (hot := _hot_tenant(view, rest_s)) is not None:
        found.append(hot)
        rest_s -= hot.lost_s
    times = PromptTimes(
        waits_s=[each.prefill_wait_s for each in requests],
        prefills_s=[each.prefill_s for each in requests],
        alone_s=reader.prefill_token_s * num_computed / len(requests),
    )
    options = [
        changes.one_more_reader(reader, times),
        changes.other_split(reader, view.decoder),
    ]
    found.append(
        DiagnosisFinding(
            cause=Cause.PREFILL,
            pool=reader.name,
            lost_s=rest_s,
            text=(
                f"prompts wait {wait_s:.2g} s for prefill and take {prefill_s:.2g} s"
                f" ({num_computed / len(requests):.0f} computed tokens each);"
                f" {reader.name} workers are busy {reader.busy_share:.0%} of the time{_walls(reader)}"
            ),
            options=tuple(each for each in options if each is not None),
        )
    )
    return found


def _lost_prefixes(prefixes: Sequence[ReportedPrefix]) -> str:
    """Return which of the prefixes that are asked for most often no worker holds wholly; empty when none is missing."""
    lost = [each for each in prefixes if each.num_held < each.num_blocks][:_NUM_LOST]
    named = ", ".join(f"{each.digest} ({each.num_held} of {each.num_blocks} blocks held)" for each in lost)
    return f"; asked for most often and not held now: {named}" if lost else ""


def _hot_tenant(view: DiagnosisInput, wait_s: float) -> DiagnosisFinding | None:
    """Return the tenant that asks for most of the work while others ask for some; None without one."""
    computed: Counter[str] = Counter()
    for each in view.requests:
        computed[each.tenant] += each.num_computed_tokens
    ((tenant, num_tokens),) = computed.most_common(1)
    share = num_tokens / max(1, computed.total())
    others = [each for each in view.requests if each.tenant != tenant]
    if not others or share < _HOT_SHARE:
        return None
    own_s = _mean([each for each in view.requests if each.tenant == tenant], lambda each: each.prefill_wait_s)
    others_s = _mean(others, lambda each: each.prefill_wait_s)
    return DiagnosisFinding(
        cause=Cause.HOT_TENANT,
        pool=view.reader.name,
        lost_s=share * wait_s,
        text=(
            f"tenant {tenant} asks for {share:.0%} of the computed tokens; its requests wait {own_s:.2g} s for prefill,"
            f" those of others {others_s:.2g} s"
        ),
        options=(
            SuggestedChange(text=f"a smaller weight, a lower max_concurrent or tokens_per_min for tenant {tenant}"),
        ),
    )


def _slow_workers(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return a finding for each worker that is several times slower than its pool."""
    prefill_s = _mean(view.requests, lambda each: each.prefill_s)
    decode_s = _mean(view.requests, lambda each: each.decode_s)
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
    exposed_s = _mean(view.requests, lambda each: each.transfer_exposed_s)
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
    tpot_s = _mean(gaps, lambda each: each.tpot_s or 0.0) if gaps else 0.0
    if not tpot_s or not pool.mean_batch:  # no gap is known when all tokens of an answer come at once
        return []
    alone = pool.decode_step_s(1.0, pool.mean_context)
    alone_s = pool.mean_decode_step_s if alone is None else alone[0]
    step_s = min(tpot_s, max(alone_s, pool.mean_decode_step_s))
    lone = "not known yet" if alone is None else short_time(alone_s)
    decode_s = _mean(view.requests, lambda each: each.decode_s)
    preempted = sum(worker.status.num_preemptions for worker in pool.workers)
    return [
        DiagnosisFinding(
            cause=Cause.DECODE,
            pool=pool.name,
            lost_s=max(0.0, (step_s - alone_s) / tpot_s) * decode_s,
            text=(
                f"a decode step takes {short_time(step_s)}, {lone} for a sequence alone: batches of"
                f" {pool.mean_batch:.1f} with {pool.mean_context:.0f} KV tokens each{_walls(pool)}"
            ),
            options=(
                changes.one_more_decoder(pool, refills=_is_awaited(view)),
                changes.fewer_weight_bits(pool),
                changes.speculation(pool),
            ),
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


def _tail(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return the time that the slowest requests lose beyond what most lose."""
    if (tail := tail_of(view.requests, view.terms)) is None:
        return []
    more = f"`kvrelay why --request {tail.slowest}` has the parts of the slowest one, `kvrelay explain` its plan"
    return [
        DiagnosisFinding(
            cause=Cause.TAIL,
            pool=view.reader.name,
            lost_s=tail.lost_s,
            text=tail.text,
            options=(SuggestedChange(text=more),),
        )
    ]


def _walls(pool: DiagnosedPool) -> str:
    """Return a pool's shares of its floors; empty where the device was not measured."""
    if not pool.memory_share and not pool.compute_share:
        return ""
    return (
        f"; of the time in steps, memory traffic needs at least {pool.memory_share:.0%}, arithmetic"
        f" {pool.compute_share:.0%}, and {pool.overhead_share:.0%} is neither"
    )


def _is_awaited(view: DiagnosisInput) -> bool:
    """Return whether requests wait for decode workers, so that each gap that one leaves is filled."""
    wait_s = _wait_s(view.requests, Wait.DECODE_ROOM) + _wait_s(view.requests, Wait.DECODE_PACE)
    return wait_s >= _MIN_SHARE * _whole_s(view.requests)


def _whole_s(requests: Sequence[RecentRequest]) -> float:
    """Return the time of a request, in the mean."""
    return _mean(requests, lambda each: each.ttft_s + each.decode_s)


def _wait_s(requests: Sequence[RecentRequest], cause: Wait) -> float:
    """Return the wait in line for a cause, in the mean."""
    return _mean(requests, lambda each: each.waits[cause])


def _mean(requests: Sequence[RecentRequest], read: Callable[[RecentRequest], float]) -> float:
    return fmean(map(read, requests))
