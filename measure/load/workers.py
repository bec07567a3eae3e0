"""Figures of workers and pools, from their own counters and the reports of requests."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from measure.load.estimates import Floats
from measure.load.records import PoolSample, RequestRecord, WorkerSample
from measure.load.summary import WorkerSummary
from measure.load.window import Window

_PREFILL, _DECODE = "prefill", "decode"


class Recorded(Protocol):
    """Records of a run, measured or simulated."""

    @property
    def requests(self) -> Sequence[RequestRecord]:
        """All requests."""

    @property
    def samples(self) -> Sequence[PoolSample]:
        """Samples of the workers."""


@dataclass(slots=True)
class _Seen:
    """Samples and counts of one worker."""

    role: str
    samples: list[tuple[float, WorkerSample]] = field(default_factory=list)
    num_prefilled: int = 0
    num_decoded: int = 0
    num_output_tokens: int = 0


def summarize_workers(
    run: Recorded, requests: Sequence[RequestRecord], window: Window
) -> tuple[tuple[WorkerSummary, ...], tuple[WorkerSummary, ...]]:
    """Return pools by role, and workers by role and name; `requests` are those that count.

    Token counts include all requests of the run, for tokens that came within the window.
    """
    seen = _collect(run, requests, window)
    workers = [_summary(name, [worker], window) for name, worker in seen.items()]
    roles = sorted({worker.role for worker in seen.values()}, key=lambda role: (role != _PREFILL, role))
    pools = [_summary(role, [w for w in seen.values() if w.role == role], window) for role in roles]
    return tuple(pools), tuple(sorted(workers, key=lambda worker: (roles.index(worker.role), worker.name)))


def peak_queued(samples: Sequence[PoolSample], window: Window) -> int | None:
    """Return the longest queue in any sample of the window; None without samples."""
    return max((sample.num_queued for sample in _inside(samples, window)), default=None)


def tokens_between(request: RequestRecord, start_s: float, end_s: float) -> int:
    """Return the number of tokens of an answer that came between two times."""
    pieces = zip(request.chunk_s, request.chunk_tokens, strict=True)
    return sum(num_tokens for at_s, num_tokens in pieces if start_s <= at_s <= end_s)


def increments(at_s: Sequence[float], counter: Sequence[float | None]) -> tuple[Floats, Floats]:
    """Return (moments with a value, growth of a counter from each to the next). A restarted worker begins with 0."""
    values = np.array(counter, dtype=np.float64)
    is_known = ~np.isnan(values)
    steps = np.diff(values[is_known])
    return np.array(at_s)[is_known], np.where(steps >= 0, steps, values[is_known][1:])


def _inside(samples: Sequence[PoolSample], window: Window) -> list[PoolSample]:
    return [sample for sample in samples if window.start_s <= sample.at_s <= window.rates_end_s]


def _collect(run: Recorded, requests: Sequence[RequestRecord], window: Window) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}
    for sample in _inside(run.samples, window):
        for worker in sample.workers:
            seen.setdefault(worker.worker_id, _Seen(worker.role)).samples.append((sample.at_s, worker))
    for request in requests:
        if (name := request.server.prefill_worker) is not None:
            seen.setdefault(name, _Seen(_PREFILL)).num_prefilled += 1
        if (name := request.server.decode_worker) is not None:
            seen.setdefault(name, _Seen(_DECODE)).num_decoded += 1
    for request in run.requests:
        if (name := request.server.decode_worker) is not None and name in seen:
            seen[name].num_output_tokens += tokens_between(request, window.start_s, window.rates_end_s)
    return seen


def _summary(name: str, workers: Sequence[_Seen], window: Window) -> WorkerSummary:
    samples = [sample for worker in workers for _, sample in worker.samples]
    computed = [_rate(worker.samples, lambda sample: sample.num_computed_tokens) for worker in workers]
    busy = [_rate(worker.samples, lambda sample: sample.busy_s) for worker in workers]
    kv = [sample.num_used_blocks / sample.num_blocks for sample in samples if sample.num_blocks]
    return WorkerSummary(
        name=name,
        role=workers[0].role,
        num_workers=len(workers),
        computed_tokens_per_s=None if None in computed else sum(rate for rate in computed if rate is not None),
        output_tokens_per_s=sum(w.num_output_tokens for w in workers) / max(window.duration_s, 1e-9),
        num_prefilled=sum(worker.num_prefilled for worker in workers),
        num_decoded=sum(worker.num_decoded for worker in workers),
        busy=_mean([rate for rate in busy if rate is not None]),
        mean_running=_mean_sum(workers, lambda sample: sample.num_running),
        mean_waiting=_mean_sum(workers, lambda sample: sample.num_waiting),
        mean_kv=_mean(kv),
        peak_kv=max(kv, default=None),
    )


def _rate(
    samples: Sequence[tuple[float, WorkerSample]], counter: Callable[[WorkerSample], float | None]
) -> float | None:
    """Return the growth of a counter per second; None without two samples."""
    at_s, steps = increments([at_s for at_s, _ in samples], [counter(sample) for _, sample in samples])
    return float(steps.sum() / (at_s[-1] - at_s[0])) if at_s.size > 1 and at_s[-1] > at_s[0] else None


def _mean_sum(workers: Sequence[_Seen], count: Callable[[WorkerSample], int]) -> float | None:
    """Return the mean over samples of the sum over workers."""
    sums: dict[float, int] = defaultdict(int)
    for worker in workers:
        for at_s, sample in worker.samples:
            sums[at_s] += count(sample)
    return _mean(list(sums.values()))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
