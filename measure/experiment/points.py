"""Cells of an experiment, and their points: the measurements of one arm, load and repeat, real or simulated."""

import enum
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.slo import Slo
from measure.figures import ALL, Figures, by_kind, percentiles, summarize
from measure.load.records import RequestRecord
from measure.load.session_figures import STRETCH, SessionFigures, session_figures
from measure.load.window import Window, counted
from measure.load.workers import Recorded, summarize_workers, tokens_between
from measure.simulate.results import ForecastCheck, check_forecasts, count_cached_tokens, gap_percentiles, hot_spot

_NUM_PARTS = 72
"""Equal parts of a run, of which a point has the worst one."""


class LoadUnit(enum.StrEnum):
    """What a load counts."""

    REQUESTS = "requests/s"
    SESSIONS = "sessions at a time"
    """In workloads of closed loops alone."""
    SESSIONS_PER_HOUR = "sessions/h"


class Source(enum.StrEnum):
    """Origin of a point."""

    REAL = "real"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of serving the workload."""

    name: str
    """"1P1D", "2 aggregated", "vllm" …"""
    num_prefill: int
    """0: aggregated. Every worker is a decode worker that computes its prompts itself."""
    num_decode: int
    settings: dict[str, str] = field(default_factory=dict)
    """Other differences between arms: policy, chunk budget, transport …; `threads` of each worker, if stated."""
    is_external: bool = False
    """Whether the experiment did not configure the server, such as another system's."""

    @property
    def num_workers(self) -> int:
        """Workers of both kinds."""
        return self.num_prefill + self.num_decode

    @property
    def is_split(self) -> bool:
        """Whether it has a prefill pool."""
        return self.num_prefill > 0

    @property
    def num_threads(self) -> int | None:
        """CPU threads of all workers; None: not stated."""
        threads = self.settings.get("threads", "")
        return int(threads) * self.num_workers if threads.isdecimal() else None

    def equals(self, other: "Arm") -> bool:
        """Return whether two arms have as many workers, or as many threads in total."""
        same_threads = self.num_threads is not None and self.num_threads == other.num_threads
        return self.num_workers == other.num_workers or same_threads

    def num_units(self, unit: "MeanUnit") -> int:
        """Return the number of units of the arm; at least 1."""
        counts = {MeanUnit.WORKER: self.num_workers, MeanUnit.THREAD: self.num_threads, MeanUnit.ARM: 1}
        return max(1, counts[unit] or self.num_workers)


class MeanUnit(enum.StrEnum):
    """Unit by which arms of different size are compared."""

    WORKER = "worker"
    THREAD = "thread"
    ARM = "arm"
    """Arms are compared as a whole: what one of their workers has is not known of all."""

    @classmethod
    def of(cls, arms: Iterable[Arm]) -> "MeanUnit":
        """Return WORKER unless arms differ in the threads of a worker; then THREAD if all state them, else ARM."""
        counts = {None if arm.num_threads is None else arm.num_threads / arm.num_workers for arm in arms}
        if len(counts) == 1:
            return cls.WORKER
        return cls.ARM if None in counts else cls.THREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of an arm under a load."""

    arm: str
    """Name of the arm."""
    load: float
    """Mean requests per second, or sessions (`LoadUnit`)."""
    repeat: int

    @property
    def name(self) -> str:
        """Name of its folder, unique and fit for a file system."""
        return f"{slug(self.arm)}@{self.load:.6g}-r{self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaidWorkers:
    """Workers of a simulated run, and changes of their pools."""

    worker_s: float
    """Time of all workers from being asked for until they were gone, up to the last arrival."""
    num_starts: int = 0
    num_flips: int = 0
    num_leaves: int = 0
    """Workers that were asked to leave, without flips."""
    num_moves: int = 0
    """Answers that moved to another worker because theirs was leaving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Measurements of one run."""

    arm: Arm
    source: Source
    load: float
    """Load of the workload, in `load_unit`."""
    repeat: int
    duration_s: float
    """Time in which counted requests arrived, without warm-up."""
    kinds: dict[str, Figures]
    """Figures of `ALL` requests first, then of each kind."""
    output_tokens_per_s: float
    token_hit: float | None
    """Cached prompt tokens of all prompt tokens; None if unknown."""
    prefill_busy: float | None
    """Share of the time in which the prefill pool computed; None without a pool, or if unknown."""
    decode_busy: float | None
    kv_peak: float | None
    """Largest share of pages in use on any worker."""
    transfer_bytes: int
    transfer_exposed_p50_s: float | None
    pulled_share: float | None = None
    """Prompt tokens pulled from other workers of the same prompt tokens; None if unknown."""
    hot_spot: float | None = None
    """Workers that compute prompts times the largest share of computed tokens of one of them; 1 is even."""
    forecasts: dict[str, ForecastCheck] = field(default_factory=dict)
    """The routers' forecasts beside the outcomes, by what they are of; without those that no request has."""
    worst_share: float | None = None
    """Share of good requests in the worst of equal parts of the time; None: not known."""
    paid: PaidWorkers | None = None
    """None for real arms."""
    sessions: SessionFigures | None = None
    """None without sessions of several requests."""
    load_unit: LoadUnit = LoadUnit.REQUESTS
    warnings: tuple[str, ...] = ()
    """Reasons not to trust the point, in words."""

    @property
    def cell(self) -> Cell:
        """Run that it measures."""
        return Cell(arm=self.arm.name, load=self.load, repeat=self.repeat)

    @property
    def overall(self) -> Figures:
        """Figures of all requests."""
        return self.kinds[ALL]

    @property
    def goodput_per_s(self) -> float:
        """Good requests per second."""
        return self.overall.num_good / self.duration_s if self.duration_s else 0.0

    @property
    def load_text(self) -> str:
        """Load with its unit."""
        return f"{self.load:g}" + ("/s" if self.load_unit is LoadUnit.REQUESTS else f" {self.load_unit}")

    @property
    def tokens_per_s_per_worker(self) -> float:
        """Output tokens per second and worker of either kind."""
        return self.output_tokens_per_s / max(1, self.arm.num_workers)

    @property
    def goodput_per_worker(self) -> float:
        """Good requests per second and worker of either kind."""
        return self.goodput_per_s / max(1, self.arm.num_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """What is good, and what the load counts."""

    slo: Slo
    stretch: float = STRETCH
    """Stretch of a good session."""
    load_unit: LoadUnit = LoadUnit.REQUESTS


def point_of(run: Recorded, window: Window, *, arm: Arm, cell: Cell, source: Source, goals: Goals) -> Point:
    """Return the point of a cell's run; only requests that were due in the window count."""
    requests = counted(run.requests, window)
    pools, _ = summarize_workers(run, requests, window)
    busy = {pool.role: pool.busy for pool in pools}
    reported = [request for request in requests if request.server.num_cached_tokens is not None]
    num_prompt_tokens = sum(request.num_prompt_tokens for request in reported)
    num_pulled_tokens = sum(request.server.num_pulled_tokens or 0 for request in reported)
    num_output_tokens = sum(tokens_between(request, window.start_s, window.rates_end_s) for request in run.requests)
    moved = [request for request in requests if request.server.transfer_bytes]
    exposed = percentiles(request.server.transfer_exposed_s for request in moved if request.is_complete)
    return Point(
        arm=arm,
        source=source,
        load=cell.load,
        repeat=cell.repeat,
        duration_s=window.duration_s,
        kinds={
            kind: summarize(own, slo=goals.slo, itl=gap_percentiles(own)) for kind, own in by_kind(requests).items()
        },
        output_tokens_per_s=num_output_tokens / window.duration_s if window.duration_s > 0 else 0.0,
        token_hit=sum(map(count_cached_tokens, reported)) / num_prompt_tokens if num_prompt_tokens else None,
        pulled_share=num_pulled_tokens / num_prompt_tokens if num_prompt_tokens else None,
        hot_spot=hot_spot(requests, num_workers=arm.num_prefill or arm.num_workers),
        forecasts=_forecasts(requests),
        prefill_busy=busy.get("prefill"),
        decode_busy=busy.get("decode"),
        kv_peak=max((pool.peak_kv for pool in pools if pool.peak_kv is not None), default=None),
        transfer_bytes=sum(request.server.transfer_bytes or 0 for request in moved),
        transfer_exposed_p50_s=None if exposed is None else exposed.p50,
        worst_share=_worst_share(requests, window, goals.slo),
        sessions=session_figures(run.requests, window, stretch=goals.stretch),
        load_unit=goals.load_unit,
    )


def _forecasts(requests: Sequence[RequestRecord]) -> dict[str, ForecastCheck]:
    complete = [request for request in requests if request.is_complete]
    checks = {
        "TTFT, entering the line": check_forecasts((r.server.line_ttft_forecast, r.server.ttft_s) for r in complete),
        "TTFT, at the choice": check_forecasts((r.server.ttft_forecast, r.server.ttft_s) for r in complete),
        "TPOT": check_forecasts((r.server.tpot_forecast, r.tpot_s) for r in complete),
    }
    return {name: check for name, check in checks.items() if check is not None}


def _worst_share(requests: Sequence[RequestRecord], window: Window, slo: Slo) -> float:
    length_s = max((window.end_s - window.start_s) / _NUM_PARTS, 1e-9)
    parts = [min(_NUM_PARTS - 1, int((request.due_s - window.start_s) / length_s)) for request in requests]
    arrived = Counter(parts)
    num_good = Counter(part for part, request in zip(parts, requests, strict=True) if slo.is_good(request))
    return min(num_good[part] / arrived[part] for part in arrived)


def num_good_sessions(point: Point) -> int:
    """Return a point's good sessions; 0 also where that is not known."""
    return 0 if point.sessions is None else point.sessions.num_good or 0


def most_good_sessions(points: Iterable[Point]) -> list[tuple[str, Source]]:
    """Return the arms' names and sources, those with most good sessions first, else in the order of their points."""
    good: Counter[tuple[str, Source]] = Counter()
    for point in points:
        good[point.arm.name, point.source] += num_good_sessions(point)
    return [key for key, _ in good.most_common()]


def slug(text: str) -> str:
    """Return a name that is fit for a file system; different texts have different names."""
    if re.fullmatch(r"[A-Za-z0-9+_=][A-Za-z0-9.=+_ -]*", text):
        return text.replace(" ", ",")
    clean = re.sub(r"[^A-Za-z0-9=+_]+", "-", text).strip("-")
    return f"{clean},{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
