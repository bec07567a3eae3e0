"""What can be seen of a load test while it runs: a bar and figures on a terminal, a line now and then elsewhere."""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.clock import Clock, SystemClock
from measure.figures import percentiles
from measure.load.records import PoolSample, RequestRecord, WorkerSample
from measure.load.spec import RunStart
from measure.pages.wording import count, duration, number, percent, scaled

RECENT_S = 10.0
"""Figures are of the answers that ended in so many seconds before."""
_REFRESH_S = 0.5
_LINE_S = 5.0
_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class _Ended:
    """What figures take from a request; latencies of complete ones only."""

    end_s: float
    num_tokens: int
    ttft_s: float | None
    tpot_s: float | None

    @classmethod
    def of(cls, request: RequestRecord) -> "_Ended":
        latencies = (request.ttft_s, request.itl_s) if request.is_complete else (None, None)
        return cls(request.end_s, request.num_output_tokens, *latencies)


class LiveView:
    """An observer that shows what happens, inside its `with` block. One event loop.

    It draws twice a second whatever the load is, which takes about a hundredth of a core.
    """

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or SystemClock()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._timer: asyncio.TimerHandle | None = None
        self._start: RunStart | None = None
        self._started_s = 0.0
        self._num_ended = 0
        self._num_failed = 0
        self._recent: deque[_Ended] = deque()
        self._num_recent_tokens = 0
        self._sample: PoolSample | None = None

    def started(self, start: RunStart) -> None:
        """Begin to show."""
        self._start = start
        self._started_s = self._clock.monotonic()
        workers = ", ".join(f"{number_of} {role}" for role, number_of in start.target.num_workers.items())
        self._console.print(
            f"{start.name}: {start.target.system}, {start.target.model}{f' ({workers})' if workers else ''};"
            f" {_plan(start)}; Ctrl-C ends it and keeps what was measured",
            soft_wrap=True,
        )
        self._wait()

    def record(self, request: RequestRecord) -> None:
        """Count a request that has ended."""
        self._num_ended += 1
        self._num_failed += not request.is_complete
        ended = _Ended.of(request)
        self._recent.append(ended)
        self._num_recent_tokens += ended.num_tokens

    def sample(self, sample: PoolSample) -> None:
        """Keep the state of the pools."""
        self._sample = sample

    def show(self) -> None:
        """Draw what is known now."""
        if self._start is None:
            return
        elapsed_s = self._clock.monotonic() - self._started_s
        while self._recent and self._recent[0].end_s < elapsed_s - RECENT_S:
            self._num_recent_tokens -= self._recent.popleft().num_tokens
        if self._live is None:
            figures = "; ".join((self._counts(elapsed_s), *self._latencies(), *self._pools()))
            self._console.print(f"{elapsed_s:6.1f} s  {figures}", soft_wrap=True)
        else:
            lines: list[RenderableType] = [self._bar(self._start, elapsed_s), Text(self._counts(elapsed_s))]
            lines += [Text(" · ".join(parts)) for parts in (self._latencies(), self._pools()) if parts]
            self._live.update(Group(*lines), refresh=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _bar(self, start: RunStart, elapsed_s: float) -> RenderableType:
        duration_s, max_requests = start.workload.duration_s, start.workload.max_requests
        shares = [elapsed_s / duration_s] if 0 < duration_s < math.inf else []
        if max_requests is not None:
            shares.append(self._num_ended / max_requests)
        grid = Table.grid(padding=(0, 1))
        clock = f"{elapsed_s:.0f} s" + (f" of {duration_s:.0f} s" if duration_s < math.inf else "")
        is_over = bool(shares) and max(shares) >= 1
        grid.add_row(
            Text(start.name, style="bold"),
            ProgressBar(total=1.0, completed=min(1.0, max(shares, default=0.0)), width=_BAR_WIDTH),
            Text(clock + (", waiting for the last answers" if is_over else "")),
        )
        return grid

    def _counts(self, elapsed_s: float) -> str:
        within_s = max(1e-9, min(elapsed_s, RECENT_S))
        failures = f", {self._num_failed:,} of them failed" if self._num_failed else ""
        return (
            f"{count(self._num_ended, 'request')} ended{failures} · {number(len(self._recent) / within_s)}/s,"
            f" {scaled(self._num_recent_tokens / within_s)} tokens/s"
        )

    def _latencies(self) -> list[str]:
        times = {"TTFT": [ended.ttft_s for ended in self._recent], "TPOT": [ended.tpot_s for ended in self._recent]}
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


def _plan(start: RunStart) -> str:
    workload = start.workload
    limits = [f"for {duration(workload.duration_s)}"] if workload.duration_s < math.inf else []
    if workload.max_requests is not None:
        limits.append(f"at most {count(workload.max_requests, 'request')}")
    closed = sum(stream.concurrency or 0 for stream in workload.streams)
    loop = f"{count(closed, 'session')} at a time" if closed else "open loop"
    return " ".join((loop, ", ".join(limits))).strip()
