"""From a load test's summary to an experiment's point."""

from measure.experiment.points import Arm, KindPoint, Latency, Point, Source
from measure.experiment.store import Cell
from measure.load.estimates import Distribution
from measure.load.summary import KindSummary, Summary


def to_point(arm: Arm, cell: Cell, summary: Summary) -> Point:
    """Return what a run on a real server says of its cell."""
    everybody = summary.overall
    prefill, decode = summary.pool("prefill"), summary.pool("decode")
    exposed = everybody.latencies.transfer_exposed
    peaks = [pool.peak_kv for pool in summary.pools if pool.peak_kv is not None]
    return Point(
        arm=arm,
        source=Source.REAL,
        load=cell.load,
        repeat=cell.repeat,
        duration_s=summary.window.duration_s,
        kinds=tuple(map(_kind, summary.kinds)),
        output_tokens_per_s=summary.throughput.output_tokens_per_s,
        token_hit=None if everybody.cache is None else everybody.cache.hit_share.value,
        prefill_busy=None if prefill is None else prefill.busy,
        decode_busy=None if decode is None else decode.busy,
        kv_peak=max(peaks, default=None),
        transfer_bytes=everybody.transfer_bytes,
        transfer_exposed_p50_s=None if exposed is None else exposed.p50,
        warnings=summary.warnings,
    )


def _kind(summary: KindSummary) -> KindPoint:
    latencies = summary.latencies
    return KindPoint(
        kind=summary.kind,
        num_requests=summary.num_requests,
        num_good=summary.num_good,
        num_refused=summary.num_not_complete,
        num_ttft_misses=summary.num_ttft_misses,
        num_itl_misses=summary.num_itl_misses,
        ttft=_latency(latencies.ttft),
        itl=_latency(latencies.itl),
        tpot=_latency(latencies.tpot),
        e2e=_latency(latencies.e2e),
    )


def _latency(distribution: Distribution | None) -> Latency | None:
    if distribution is None:
        return None
    return Latency(p50=distribution.p50, p90=distribution.p90, p99=distribution.p99)
