"""What a run was worth: latencies, goodput, hits, balance.

Requests that were refused or failed count in goodput, as not good, and in nothing else: they have no latency. A cached
token is a prompt token that the computing worker did not compute, pulled ones included.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.slo import Slo
from measure.simulate.records import RequestResult, SimRun, WorkerResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of a time, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles | None":
        """Return the percentiles, interpolated between values; None of nothing."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(array, [50, 90, 99]))
        return cls(p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in numbers, all of them functions of what went into it."""

    num_requests: int
    num_complete: int
    num_refused: int
    """Refused or failed, for whatever reason."""
    num_ttft_misses: int
    """Complete, but the first token came late."""
    num_itl_misses: int
    """Complete, but the tokens came slowly."""
    goodput_per_s: float
    """Good requests per second of arrivals."""
    good_share: float
    """Good requests of all."""
    token_hit: float
    """Cached tokens of all prompt tokens of complete requests."""
    pulled_share: float
    """Pulled tokens of the same."""
    hot_spot: float
    """Workers that compute prompts times the largest share of computed tokens that one of them had; 1 is even."""
    ttft: Percentiles | None
    itl: Percentiles | None
    """Of the requests' mean gaps (TPOT)."""
    e2e: Percentiles | None
    gap_p99_s: float | None
    """Of all gaps between tokens; the bound of a 2 % wide bin."""
    num_transfers: int
    """Requests whose KV, or a part of it, moved between workers."""
    transfer_bytes: int
    prefill_busy: float | None
    """Share of the run that prefill workers computed; None without any."""
    decode_busy: float
    """The same of decode workers, which are all in aggregated serving."""
    num_preemptions: int
    predicted_hit_error: float
    """Mean of |predicted - actual| cached tokens, as a share of the prompt tokens."""
    end_s: float
    """When the last request had ended."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Summary":
        """Return what `dataclasses.asdict` made JSON of."""
        times = {name: Percentiles(**values[name]) if values[name] else None for name in ("ttft", "itl", "e2e")}
        return cls(**(values | times))


def summarize(run: SimRun, *, slo: Slo, num_prefill: int) -> Summary:
    """Return the numbers of a run. With prefill workers, balance is theirs; else it is everybody's."""
    results = run.results
    complete = [result for result in results if result.is_complete]
    num_good = sum(slo.is_good(result) for result in results)
    duration_s = results[-1].arrival_s - results[0].arrival_s if results else 0.0
    num_prompt_tokens = sum(result.num_prompt_tokens for result in complete)
    prefill = [worker for worker in run.workers if worker.is_prefill]
    decode = [worker for worker in run.workers if not worker.is_prefill]
    return Summary(
        num_requests=len(results),
        num_complete=len(complete),
        num_refused=len(results) - len(complete),
        num_ttft_misses=sum(not slo.meets_ttft(result) for result in complete),
        num_itl_misses=sum(not slo.meets_tpot(result) for result in complete),
        goodput_per_s=num_good / duration_s if duration_s else 0.0,
        good_share=_share(num_good, len(results)),
        token_hit=_share(sum(result.num_cached_tokens for result in complete), num_prompt_tokens),
        pulled_share=_share(sum(result.num_pulled_tokens for result in complete), num_prompt_tokens),
        hot_spot=hot_spot(results, num_workers=num_prefill or len(run.workers)),
        ttft=Percentiles.of(r.ttft_s for r in complete if r.ttft_s is not None),
        itl=Percentiles.of(r.tpot_s for r in complete if r.tpot_s is not None),
        e2e=Percentiles.of(r.e2e_s for r in complete if r.e2e_s is not None),
        gap_p99_s=gap_percentile(run.gaps, 0.99),
        num_transfers=sum(result.transfer_bytes > 0 for result in results),
        transfer_bytes=sum(result.transfer_bytes for result in results),
        prefill_busy=_busy(prefill, run.end_s) if prefill else None,
        decode_busy=_busy(decode, run.end_s),
        num_preemptions=sum(worker.num_preemptions for worker in run.workers),
        predicted_hit_error=_share(
            sum(abs(r.predicted_cached_tokens - r.num_cached_tokens) for r in complete), num_prompt_tokens
        ),
        end_s=run.end_s,
    )


def hot_spot(results: Sequence[RequestResult], *, num_workers: int) -> float:
    """Return the number of workers times the largest one's share of the prompt tokens that had to be computed.

    Counted by the prefill workers' part alone when there are any in the plans: decode workers then only compute
    suffixes. 1 when nothing was computed.
    """
    computed: Counter[str] = Counter()
    is_remote = any(result.prefill_worker for result in results)
    for result in results:
        worker = result.prefill_worker if is_remote else result.decode_worker
        if worker:
            computed[worker] += result.num_prompt_tokens - result.num_cached_tokens
    total = computed.total()
    return num_workers * max(computed.values()) / total if total else 1.0


def gap_percentile(gaps: Sequence[tuple[float, int]], share: float) -> float | None:
    """Return the bin in which a share of all gaps is reached; None when there are none."""
    rank = math.ceil(share * sum(count for _, count in gaps))
    for upper_s, count in gaps:
        rank -= count
        if rank <= 0 < count:
            return upper_s
    return None


def _busy(workers: Sequence[WorkerResult], end_s: float) -> float:
    return _share(sum(worker.busy_s for worker in workers), len(workers) * end_s)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
