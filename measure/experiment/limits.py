"""Which pool gives way first as the load grows.

A prefill pool that is too small shows in late first tokens, and in requests that are refused because of them. A decode
pool that is too small shows in long gaps between tokens, or in full pages: then answers wait for a place, and their
first tokens are late. Utilization tells less: a decode worker steps whenever it has one answer to write, so it is busy
long before it is full.
"""

import enum
from dataclasses import dataclass

from measure.experiment.curves import Curve, Reading

_FULL_SHARE = 0.95
"""Share of pages in use from which requests wait for memory."""
_SPARE_SHARE = 0.8
"""Utilization below which a prefill pool has time left."""


class Limit(enum.StrEnum):
    """Resource that is too small."""

    NOTHING = "nothing yet"
    PREFILL = "prefill pool"
    DECODE = "decode pool"
    MEMORY = "KV memory"
    WORKERS = "workers"
    """Workers of an aggregated arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Limit of an arm at one load."""

    limit: Limit
    load: float
    why: str
    """Reason, with numbers."""


def diagnose(reading: Reading, curve: Curve, *, share: float) -> Diagnosis:
    """Return the resource that keeps `share` of the requests at a load from being good."""
    bad = 1 - reading.good_share.value
    if bad <= 1 - share:
        why = f"{reading.good_share.value:.1%} of the requests were good"
        return Diagnosis(limit=Limit.NOTHING, load=reading.load, why=why)
    late = reading.share_of(lambda figures: figures.num_ttft_misses)
    slow = reading.share_of(lambda figures: figures.num_itl_misses)
    refused = reading.share_of(lambda figures: figures.num_not_complete)
    kv_peak = reading.mean_of(lambda point: point.kv_peak)
    busy = reading.mean_of(lambda point: point.prefill_busy)
    is_full = kv_peak is not None and kv_peak >= _FULL_SHARE
    why = f"{late:.1%} of the first tokens came late, {refused:.1%} were refused, {slow:.1%} of the answers were slow"
    if busy is not None:
        why += f"; the prefill pool computed {busy:.0%} of the time"
    if kv_peak is not None:
        why += f", at most {kv_peak:.0%} of a worker's pages were in use"
    return Diagnosis(limit=_limit(curve, late + refused, slow, busy, is_full=is_full), load=reading.load, why=why)


def _limit(curve: Curve, late: float, slow: float, busy: float | None, *, is_full: bool) -> Limit:
    if curve.arm.num_prefill == 0:
        return Limit.MEMORY if is_full else Limit.WORKERS
    if slow > late:
        return Limit.DECODE
    has_time_left = busy is not None and busy < _SPARE_SHARE
    return Limit.MEMORY if is_full and has_time_left else Limit.PREFILL


def first_limit(curve: Curve, *, share: float) -> Diagnosis:
    """Return the diagnosis of the lowest load that was not served; of the highest one when all were."""
    diagnoses = [diagnose(reading, curve, share=share) for reading in curve.readings]
    return next((each for each in diagnoses if each.limit is not Limit.NOTHING), diagnoses[-1])
