"""What a simulated run says as a point of an experiment."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from common.slo import Slo
from measure.experiment.points import Arm, KindPoint, Latency, Point, Source
from measure.simulate.records import LoadSample, RequestResult, SimRun
from measure.simulate.results import Percentiles, gap_percentile

_ALL = "all"
_TOLERATED = 0.1
"""By such a share fewer requests than the load says may come."""

Gaps = Sequence[tuple[float, int]]


def point_of(finished: SimRun, *, arm: Arm, slo: Slo, window_s: tuple[float, float], load: float, repeat: int) -> Point:
    """Return a run's point; requests that came outside the window do not count.

    `window_s`: end of the warm-up, beginning of the last session.
    """
    start_s, end_s = window_s
    counted = [result for result in finished.results if start_s <= result.arrival_s <= end_s]
    duration_s = max(0.0, end_s - start_s)
    complete = [result for result in counted if result.is_complete]
    prefill_busy, decode_busy, kv_peak = _loads(finished.samples, arm, window_s)
    exposed = [result.transfer_exposed_s for result in complete if result.transfer_bytes]
    num_prompt_tokens = sum(result.num_prompt_tokens for result in complete)
    return Point(
        arm=arm,
        source=Source.SIMULATED,
        load=load,
        repeat=repeat,
        duration_s=duration_s,
        kinds=_kinds(finished, counted, slo),
        output_tokens_per_s=sum(r.num_output_tokens for r in complete) / duration_s if duration_s else 0.0,
        token_hit=sum(r.num_cached_tokens for r in complete) / num_prompt_tokens if num_prompt_tokens else None,
        prefill_busy=prefill_busy,
        decode_busy=decode_busy,
        kv_peak=kv_peak,
        transfer_bytes=sum(result.transfer_bytes for result in counted),
        transfer_exposed_p50_s=float(np.median(exposed)) if exposed else None,
        warnings=_warnings(len(counted), load * duration_s),
    )


def _warnings(num_counted: int, num_expected: float) -> tuple[str, ...]:
    """Return why fewer requests count than the load says, if that is not by chance."""
    if not num_counted:
        return ("no request came after the warm-up",)
    if num_counted < (1 - _TOLERATED) * num_expected - 3 * math.sqrt(num_expected):
        return ("much less than the load came while it was measured: the warm-up is too short for its sessions",)
    return ()


def _kinds(finished: SimRun, counted: Sequence[RequestResult], slo: Slo) -> tuple[KindPoint, ...]:
    """Return everybody's numbers, and each kind's when there are several."""
    names = sorted({result.kind for result in counted})
    gaps = {name: finished.kind_gaps.get(name, ()) for name in names}
    everybody = _kind(_ALL, counted, _added(list(gaps.values())), slo)
    return (
        everybody,
        *(_kind(name, [r for r in counted if r.kind == name], gaps[name], slo) for name in names),
    )


def _kind(name: str, results: Sequence[RequestResult], gaps: Gaps, slo: Slo) -> KindPoint:
    complete = [result for result in results if result.is_complete]
    return KindPoint(
        kind=name,
        num_requests=len(results),
        num_good=sum(slo.is_good(result) for result in results),
        num_refused=len(results) - len(complete),
        num_ttft_misses=sum(not slo.meets_ttft(result) for result in complete),
        num_itl_misses=sum(not slo.meets_tpot(result) for result in complete),
        ttft=_latency(result.ttft_s for result in complete),
        itl=_gap_latency(gaps),
        tpot=_latency(result.tpot_s for result in complete),
        e2e=_latency(result.e2e_s for result in complete),
    )


def _latency(values: Iterable[float | None]) -> Latency | None:
    found = Percentiles.of(value for value in values if value is not None)
    return None if found is None else Latency(p50=found.p50, p90=found.p90, p99=found.p99)


def _gap_latency(gaps: Gaps) -> Latency | None:
    p50, p90, p99 = (gap_percentile(gaps, share) for share in (0.5, 0.9, 0.99))
    if p50 is None or p90 is None or p99 is None:
        return None
    return Latency(p50=p50, p90=p90, p99=p99)


def _added(parts: Sequence[Gaps]) -> Gaps:
    """Return the gaps of several kinds as one row of bins."""
    total: Counter[float] = Counter()
    for gaps in parts:
        total.update(dict(gaps))
    return sorted(total.items())


def _loads(
    samples: Sequence[LoadSample], arm: Arm, window_s: tuple[float, float]
) -> tuple[float | None, float | None, float | None]:
    """Return the busy shares of both pools and the largest share of pages in use, of the window."""
    start_s, end_s = window_s
    inside = [sample for sample in samples if start_s <= sample.at_s <= end_s]
    if len(inside) < 2:
        return None, None, None
    first, last = inside[0], inside[-1]
    busy = (np.array(last.busy_s) - np.array(first.busy_s)) / (last.at_s - first.at_s)
    pools = busy[: arm.num_prefill], busy[arm.num_prefill :]  # prefill workers come first
    prefill, decode = (float(pool.mean()) if pool.size else None for pool in pools)
    return prefill, decode, max(max(sample.used_share) for sample in inside)
