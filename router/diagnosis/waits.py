"""Causes of the waits before the first chunk of a prompt: in line for anything but prefill, and for prefill itself."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

from router.diagnosis import changes
from router.diagnosis.changes import PromptTimes, SuggestedChange
from router.diagnosis.finding import (
    Cause,
    DiagnosisFinding,
    DiagnosisInput,
    describe_walls,
    mean,
    mean_wait_s,
    mean_whole_s,
)
from router.fleet.hot_prefixes import ReportedPrefix
from router.placement.waits import WaitCause

_HOT_SHARE = 0.6
"""Share of the computed tokens from which a tenant counts as the cause of a wait."""
_NUM_LOST = 3
"""Prefixes that a sentence names."""
_LONGER_GAPS = "a longer slo.tpot_s: larger batches"
_MORE_PLACES = "more places on each (max_running): larger batches, with longer steps"
_MORE_MEMORY = "more memory on each (kv_memory_gib): larger batches, with longer steps"
_MORE_PAGES = "more pages on each (num_blocks, kv_dtype int8): larger batches, with longer steps"
_FEWER_READS = "more pages on each worker (num_blocks, kv_dtype int8), or a larger tier in host memory before the disk"
_SCARCE = 0.7
"""Share of promised window pages from which on they are what is waited for."""
_LOOK_AT_WORKERS = "`kvrelay status` shows which workers are ready, `kvrelay logs` why one was not"


def line_waits(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return the waits in line for anything but prefill."""
    pool = view.decoder
    pace = f"with another one in a batch of {pool.mean_batch:.1f}, gaps between tokens would miss their objective"
    worker_s = mean_wait_s(view.in_line, WaitCause.WORKER)
    return [
        _decode_room(view),
        _decode_wall(view, WaitCause.DECODE_PACE, f"the pace of answers: {pace} (slo.tpot_s)", instead=_LONGER_GAPS),
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


def _decode_room(view: DiagnosisInput) -> DiagnosisFinding:
    """Return the wait for room on decode workers, by what they have less of: places in batches, or pages."""
    pool = view.decoder
    held = f"batches are of {pool.mean_batch:.1f}, and answers hold {pool.used_page_share:.0%} of the pages"
    if (share := pool.promised_window_share) > max(_SCARCE, pool.used_page_share):
        what = f"pages of windows or states, of which {share:.0%} are promised: batches are of {pool.mean_batch:.1f}"
        return _decode_wall(view, WaitCause.DECODE_ROOM, what, instead=_MORE_MEMORY)
    if pool.num_places < pool.num_held_by_pages:
        what = f"one of the {pool.num_places:g} places in batches (max_running)"
        return _decode_wall(view, WaitCause.DECODE_ROOM, f"{what}: {held}", instead=_MORE_PLACES)
    return _decode_wall(view, WaitCause.DECODE_ROOM, f"pages: {held}", instead=_MORE_PAGES)


def _decode_wall(view: DiagnosisInput, wait: WaitCause, what: str, *, instead: str) -> DiagnosisFinding:
    pool, wait_s = view.decoder, mean_wait_s(view.in_line, wait)
    options = [
        changes.more_answers(pool, instead),
        changes.fewer_weight_bits(pool, view.reader),
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
    for each in view.in_line:
        waits_s[each.tenant] += each.waits[WaitCause.TENANT_LIMIT]
    tenant = max(waits_s, key=lambda name: waits_s[name])
    own_s = mean_wait_s([each for each in view.in_line if each.tenant == tenant], WaitCause.TENANT_LIMIT)
    return DiagnosisFinding(
        cause=Cause.TENANT_LIMIT,
        pool="",
        lost_s=mean_wait_s(view.in_line, WaitCause.TENANT_LIMIT),
        text=(
            f"requests of tenant {tenant} wait {own_s:.2g} s in line for each other: as many as its max_concurrent"
            " allows are served, whatever workers could take"
        ),
        options=(SuggestedChange(text=f"a higher max_concurrent for tenant {tenant}"),),
    )


def prefill_waits(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return the causes of waits for prefill, and of prefills that a cache should have saved."""
    requests, reader = view.requests, view.reader
    wait_s, prefill_s = mean(requests, lambda each: each.prefill_wait_s), mean(requests, lambda each: each.prefill_s)
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
            options=(changes.larger_cache(evicted, saved_s, request_s=mean_whole_s(requests)),),
        )
    ]
    rest_s = (1 - evicted) * wait_s
    found.append(_tier_reads(view, rest_s))
    rest_s -= found[-1].lost_s
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
                f" {reader.name} workers are busy {reader.busy_share:.0%} of the time{describe_walls(reader)}"
            ),
            options=tuple(each for each in options if each is not None),
        )
    )
    return found


def _tier_reads(view: DiagnosisInput, wait_s: float) -> DiagnosisFinding:
    """Return the part of a wait in which blocks were read from tiers, as far as plans are remembered."""
    plans = view.terms({each.request_id for each in view.requests}).values()
    reads_s = [terms.get("tier_read", 0.0) for terms in plans]
    lost_s = min(wait_s, fmean(reads_s)) if reads_s else 0.0
    share = sum(each > 0 for each in reads_s) / max(1, len(reads_s))
    return DiagnosisFinding(
        cause=Cause.TIER_READ,
        pool=view.reader.name,
        lost_s=lost_s,
        text=f"prompts wait {lost_s:.2g} s for cached blocks that are read from tiers, as {share:.0%} of them do",
        options=(SuggestedChange(text=_FEWER_READS),),
    )


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
    own_s = mean([each for each in view.requests if each.tenant == tenant], lambda each: each.prefill_wait_s)
    others_s = mean(others, lambda each: each.prefill_wait_s)
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
