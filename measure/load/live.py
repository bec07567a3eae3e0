"""Progress of a load test: figures that stay on a terminal, a line every few seconds elsewhere."""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from common.clock import Clock, SystemClock
from measure.figures import percentiles
from measure.load.records import PoolSample, RequestRecord, WorkerSample
from measure.load.spec import LoadSpec
from measure.load.targets.interface import TargetInfo
from measure.pages.wording import count, duration, number, percent, scaled
from measure.workload.sessions import Workload

RECENT_S = 10.0
"""Figures cover answers that ended within this time."""
_REFRESH_S = 0.5
_LINE_S = 5.0


class LiveView:
    """An observer that shows progress inside its `with` block. One event loop.

    It draws twice a second, whatever the load, which takes about a hundredth of a core.
    """

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or SystemClock()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._timer: asyncio.TimerHandle | None = None
        self._spec: LoadSpec | None = None
        self._started_s = 0.0
        self._num_ended = 0
        self._num_failed = 0
        self._recent: deque[RequestRecord] = deque()
        self._num_recent_tokens = 0
        self._sample: PoolSample | None = None

    def started(self, spec: LoadSpec, target: TargetInfo) -> None:
        """Start the display."""
        self._spec = spec
        self._started_s = self._clock.monotonic()
        workers = ", ".join(f"{number_of} {role}" for role, number_of in target.num_workers.items())
        self._console.print(
            f"{spec.name}: {target.system}, {target.model}{f' ({workers})' if workers else ''};"
            f" {_plan(spec.workload)}; Ctrl-C ends it and keeps the results",
            soft_wrap=True,
        )
        self._wait()

    def record(self, request: RequestRecord) -> None:
        """Count a request that has ended."""
        self._num_ended += 1
        self._num_failed += not request.is_complete
        self._recent.append(request)
        self._num_recent_tokens += request.num_output_tokens

    def sample(self, sample: PoolSample) -> None:
        """Keep the state of the pools."""
        self._sample = sample

    def show(self) -> None:
        """Draw the current state."""
        if self._spec is None:
            return
        elapsed_s = self._clock.monotonic() - self._started_s
        while self._recent and self._recent[0].end_s < elapsed_s - RECENT_S:
            self._num_recent_tokens -= self._recent.popleft().num_output_tokens
        figures = (self._counts(elapsed_s), *self._latencies(), *self._pools())
        text = f"{self._progress(self._spec, elapsed_s)}  {'; '.join(figures)}"
        if self._live is None:
            self._console.print(text, soft_wrap=True)
        else:
            self._live.update(Text(text), refresh=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._live is not None:
            self._live.stop()

    def _wait(self) -> None:
        period_s = _LINE_S if self._live is None else _REFRESH_S
        self._timer = asyncio.get_running_loop().call_later(period_s, self._tick)

    def _tick(self) -> None:
        self._wait()
        self.show()

    def _progress(self, spec: LoadSpec, elapsed_s: float) -> str:
        duration_s, max_requests = spec.workload.duration_s, spec.workload.max_requests
        of_duration = f" of {duration_s:.0f} s" if duration_s < math.inf else ""
        is_over = elapsed_s >= duration_s or (max_requests is not None and self._num_ended >= max_requests)
        return f"{elapsed_s:.0f} s{of_duration}" + (", waiting for the last answers" if is_over else "")

    def _counts(self, elapsed_s: float) -> str:
        within_s = max(1e-9, min(elapsed_s, RECENT_S))
        failures = f", {self._num_failed:,} of them failed" if self._num_failed else ""
        return (
            f"{count(self._num_ended, 'request')} ended{failures} · {number(len(self._recent) / within_s)}/s,"
            f" {scaled(self._num_recent_tokens / within_s)} tokens/s"
        )

    def _latencies(self) -> list[str]:
        complete = [request for request in self._recent if request.is_complete]
        times = {"TTFT": [request.ttft_s for request in complete], "TPOT": [request.tpot_s for request in complete]}
        parts = []
        for name, values in times.items():
            if found := percentiles(values):
                parts.append(f"{name} p50 {duration(found.p50)}, p99 {duration(found.p99)}")
        return parts

    def _pools(self) -> list[str]:
        if self._sample is None:
            return []
        by_role: dict[str, list[WorkerSample]] = {}
        for worker in self._sample.workers:
            by_role.setdefault(worker.role, []).append(worker)
        queued = [f"{self._sample.num_queued} in line"] if self._sample.num_queued else []
        return [*queued, *(_pool(role, workers) for role, workers in sorted(by_role.items(), reverse=True))]


def _pool(role: str, workers: Sequence[WorkerSample]) -> str:
    num_waiting, num_blocks = sum(w.num_waiting for w in workers), sum(w.num_blocks for w in workers)
    waiting = f", {num_waiting} waiting" if num_waiting else ""
    kv_share = sum(w.num_used_blocks for w in workers) / max(1, num_blocks)
    return f"{role} {sum(w.num_running for w in workers)} running{waiting}, KV {percent(kv_share, 0)}"


def _plan(workload: Workload) -> str:
    limits = [f"for {duration(workload.duration_s)}"] if workload.duration_s < math.inf else []
    if workload.max_requests is not None:
        limits.append(f"at most {count(workload.max_requests, 'request')}")
    closed = sum(stream.concurrency or 0 for stream in workload.streams)
    loop = f"{count(closed, 'session')} at a time" if closed else "open loop"
    return " ".join((loop, ", ".join(limits))).strip()
