"""From a run, real or simulated, to a point of an experiment."""

from collections.abc import Sequence

from common.slo import Slo
from measure.experiment.points import Arm, Point, Source
from measure.experiment.store import Cell
from measure.figures import by_kind, percentiles, summarize
from measure.load.records import RequestRecord
from measure.load.summary import Window
from measure.load.window import counted
from measure.load.workers import Recorded, summarize_workers, tokens_between
from measure.simulate.results import gap_percentiles


def fixed_window(requests: Sequence[RequestRecord], *, start_s: float, end_s: float) -> Window:
    """Return the window of the requests that were due from `start_s` to `end_s`."""
    end_s = max(start_s, end_s)
    num_before = sum(request.due_s < start_s for request in requests)
    num_after = sum(request.due_s > end_s for request in requests)
    return Window(
        start_s=start_s,
        end_s=end_s,
        rates_end_s=end_s,
        num_counted=len(requests) - num_before - num_after,
        num_before=num_before,
        num_after=num_after,
        rule=f"due from {start_s:.1f} s to {end_s:.1f} s",
    )


def point_of(run: Recorded, window: Window, *, arm: Arm, cell: Cell, source: Source, slo: Slo) -> Point:
    """Return the point of a cell's run; only requests that were due in the window count."""
    requests = counted(run.requests, window)
    pools, _ = summarize_workers(run, requests, window)
    busy = {pool.role: pool.busy for pool in pools}
    told = [request for request in requests if request.server.num_cached_tokens is not None]
    num_prompt_tokens = sum(request.num_prompt_tokens for request in told)
    num_output_tokens = sum(tokens_between(request, window.start_s, window.rates_end_s) for request in run.requests)
    moved = [request for request in requests if request.server.transfer_bytes]
    exposed = percentiles(request.server.transfer_exposed_s for request in moved if request.is_complete)
    return Point(
        arm=arm,
        source=source,
        load=cell.load,
        repeat=cell.repeat,
        duration_s=window.duration_s,
        kinds={kind: summarize(own, slo=slo, itl=gap_percentiles(own)) for kind, own in by_kind(requests).items()},
        output_tokens_per_s=num_output_tokens / window.duration_s if window.duration_s > 0 else 0.0,
        token_hit=sum(request.server.num_cached_tokens or 0 for request in told) / num_prompt_tokens
        if num_prompt_tokens
        else None,
        prefill_busy=busy.get("prefill"),
        decode_busy=busy.get("decode"),
        kv_peak=max((pool.peak_kv for pool in pools if pool.peak_kv is not None), default=None),
        transfer_bytes=sum(request.server.transfer_bytes or 0 for request in moved),
        transfer_exposed_p50_s=None if exposed is None else exposed.p50,
    )
