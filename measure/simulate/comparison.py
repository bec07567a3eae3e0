"""Replays a trace on a grid, policies times speeds, several cells at a time; finished cells are kept.

    OUT/settings.json                 settings that all cells share
    OUT/cells/POLICY@SPEED/           a cell; complete once it has a summary
        requests.jsonl                every request, see `measure.simulate.store.write_requests`
        workers.json                  the workers' counters
        summary.json                  `measure.simulate.results.SimulationSummary`
        clock.json                    real time of the run, and of the router's choices

All files but `clock.json` are functions of the settings: two runs are equal byte for byte.
"""

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from common.config import RouterConfig
from common.slo import Slo
from measure.simulate.ablations import ABLATIONS, arm_of
from measure.simulate.policies.registry import GREEDY_PERFECT_SIGNALS, REPLAY_POLICIES
from measure.simulate.records import Arrival, ClusterShape, NetworkShape, SimRun, SimSettings
from measure.simulate.results import SimulationSummary, summarize_run
from measure.simulate.roofline import Hardware
from measure.simulate.store import ResultFolder, in_processes, write_json, write_requests
from measure.workload.content import ContentWriter
from measure.workload.traces import Trace, read_trace

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized
from measure.workload.waves import SpeedStages, in_stages

MAX_TOKENS = 2048
"""Limit that every request states: a router cannot know the length of the answer."""
PERFECT_REPORT_INTERVAL_S = 1e-3
"""Report interval for the policy with perfect signals, which also knows the lengths of the answers."""
REQUESTS_FILE = "requests.jsonl"
_SUMMARY = TypeAdapter(SimulationSummary)


class ReplayError(Exception):
    """A replay cannot be started; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Settings that all cells of a comparison share."""

    trace: Path
    trace_block_size: int | None = None
    """Tokens per block id of the file; None: as the file says, else 512."""
    num_requests: int | None = None
    """Number of requests from the beginning of the trace; None: all."""
    shrink: int = 1
    """Divisor of all lengths, and of the trace's blocks."""
    stages: SpeedStages | None = None
    """Speeds over time, on top of a cell's speed; None: the trace's own clock."""
    num_prefill: int
    """0: aggregated."""
    num_decode: int
    num_routers: int = 1
    num_blocks: int = 3000
    block_size: int = 512
    max_step_tokens: int
    hardware: Hardware = field(default_factory=Hardware)
    slo: Slo
    shed: str = "deadline"
    """Requests that routers refuse at once, see `RouterConfig`."""
    event_lag_s: float = 0.02
    report_interval_s: float = 0.1
    seed: int = 0

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings as JSON values, with digests of files in place of paths."""
        values = asdict(self)
        values["trace"] = _digest(self.trace)
        if self.hardware.timing_file is not None:
            values["hardware"] = {"timing_file": _digest(self.hardware.timing_file)}
        else:
            del values["hardware"]["timing_file"]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCell:
    """One run of a comparison."""

    policy: str
    speed: float

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.policy}@{self.speed:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WallClock:
    """Real time of a run, which differs each time."""

    wall_s: float
    num_choices: int
    choice_p50_us: float
    choice_p99_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """A finished cell."""

    cell: ReplayCell
    summary: SimulationSummary
    clock: WallClock


def policy_names() -> tuple[str, ...]:
    """Return every policy that can be compared."""
    return (*REPLAY_POLICIES, *ABLATIONS)


def load_trace(settings: ReplaySettings) -> Trace:
    """Return the trace at speed 1 as the cells replay it. Raises TraceError, ReplayError, OSError."""
    trace = read_trace(settings.trace, block_size=settings.trace_block_size)
    if settings.num_requests is not None:
        trace = trace.first(settings.num_requests)
    trace = trace.shrunk(settings.shrink)
    if trace.block_size % settings.block_size:
        raise ReplayError(
            f"pages of {settings.block_size} tokens do not divide the trace's blocks of {trace.block_size}:"
            " shared blocks of the trace would not be shared here; choose another --block-size"
        )
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in trace.requests)
    if longest > settings.num_blocks * settings.block_size:
        raise ReplayError(
            f"{trace.name}: its longest request has {longest} tokens;"
            f" a worker has {settings.num_blocks} pages of {settings.block_size}"
        )
    return trace


def replayed_trace(settings: ReplaySettings, speed: float) -> Trace:
    """Return the trace as it is replayed at a speed. Raises as `load_trace`."""
    trace = load_trace(settings).faster(speed)
    return trace if settings.stages is None else in_stages(trace, settings.stages)


def run_cell(settings: ReplaySettings, cell: ReplayCell, folder: Path) -> CellResult:
    """Replay the trace and write the cell's files, over those of an earlier try. Takes seconds to minutes."""
    from measure.simulate.cluster import run

    trace = replayed_trace(settings, cell.speed)
    shape, sim_settings = simulation(settings, cell.policy)
    # The policy with perfect signals knows the lengths of the answers; all other requests allow any length.
    max_tokens = 1 if cell.policy == GREEDY_PERFECT_SIGNALS else max(1, MAX_TOKENS // settings.shrink)
    arrivals = trace_arrivals(trace, slo=settings.slo, max_tokens=max_tokens, seed=settings.seed)
    done = run(shape, sim_settings, arrivals, progress=_count_request)
    summary = summarize_run(done, slo=settings.slo, num_prefill=settings.num_prefill)
    result = CellResult(cell=cell, summary=summary, clock=_clock(done))
    _write(folder, done, result)
    return result


_num_ended: "Synchronized[int] | None" = None
"""Counter of the requests that have ended in the cells of a comparison; shared by its processes."""


def _count_in(counter: "Synchronized[int]") -> None:
    """Count the requests of this process's cells there."""
    global _num_ended
    _num_ended = counter


def _count_request(_num_of_cell: int) -> None:
    if _num_ended is not None:
        with _num_ended.get_lock():
            _num_ended.value += 1


def read_cell(cell: ReplayCell, folder: Path) -> CellResult | None:
    """Return a cell that is finished; None for any other. Raises OSError."""
    if not (folder / "summary.json").exists():
        return None
    return CellResult(
        cell=cell,
        summary=_SUMMARY.validate_json((folder / "summary.json").read_bytes()),
        clock=WallClock(**json.loads((folder / "clock.json").read_bytes())),
    )


def simulation(settings: ReplaySettings, policy: str) -> tuple[ClusterShape, SimSettings]:
    """Return the cluster that a policy is replayed on, and the run's settings. Raises as `Hardware.pace`."""
    is_perfect, arm = policy == GREEDY_PERFECT_SIGNALS, arm_of(policy)
    pace, link, kv_bytes_per_token = settings.hardware.pace(settings.max_step_tokens)
    shape = ClusterShape(
        num_prefill=settings.num_prefill,
        num_decode=settings.num_decode,
        num_routers=settings.num_routers,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        block_bytes=settings.block_size * kv_bytes_per_token,
        max_step_tokens=settings.max_step_tokens,
    )
    return shape, SimSettings(
        prefill=pace,
        decode=pace,
        network=NetworkShape(kv_bytes_per_s=link.bytes_per_s),
        router=RouterConfig.model_validate({"shed": settings.shed if arm.sheds else "none"}),
        substitutes=arm.substitutes,
        report_interval_s=PERFECT_REPORT_INTERVAL_S if is_perfect else settings.report_interval_s,
        event_lag_s=0.0 if is_perfect else settings.event_lag_s,
        tpot_slo_s=settings.slo.tpot_s,
        seed=settings.seed,
    )


def trace_arrivals(trace: Trace, *, slo: Slo, max_tokens: int = MAX_TOKENS, seed: int = 0) -> Iterator[Arrival]:
    """Yield a trace's requests. Each states its objective and allows `max_tokens`, or its length if that is more."""
    writer = ContentWriter(seed=seed)
    for request in trace.requests:
        yield Arrival(
            at_s=request.arrival_s,
            prompt=writer.tokens(trace.segments(request)),
            num_output_tokens=request.num_output_tokens,
            max_tokens=max(max_tokens, request.num_output_tokens),
            ttft_slo_s=slo.ttft_of(request.num_prompt_tokens),
        )


def _clock(done: SimRun) -> WallClock:
    p50, p99 = np.percentile(done.choice_s, [50, 99]) if len(done.choice_s) else (0.0, 0.0)
    return WallClock(
        wall_s=done.wall_s,
        num_choices=len(done.choice_s),
        choice_p50_us=float(p50) * 1e6,
        choice_p99_us=float(p99) * 1e6,
    )


def _write(folder: Path, done: SimRun, result: CellResult) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    summary = folder / "summary.json"
    summary.unlink(missing_ok=True)
    write_requests(folder / REQUESTS_FILE, done.requests)
    write_json(folder / "workers.json", [asdict(worker) for worker in done.workers])
    write_json(folder / "clock.json", asdict(result.clock))
    write_json(summary, asdict(result.summary))  # last and atomically: it marks the cell as complete


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyComparison:
    """Cells to run, and the folder of their results."""

    settings: ReplaySettings
    policies: tuple[str, ...]
    speeds: tuple[float, ...]
    out: Path
    num_ended: "Synchronized[int]" = field(
        default_factory=lambda: multiprocessing.get_context("spawn").Value("Q", 0), compare=False, repr=False
    )
    """Requests that have ended, in all cells that run or have run; for a look from another thread."""

    @property
    def cells(self) -> tuple[ReplayCell, ...]:
        """All cells, by speed, then by policy."""
        return tuple(ReplayCell(policy=policy, speed=speed) for speed in self.speeds for policy in self.policies)

    def folder(self, cell: ReplayCell) -> Path:
        """Return the folder of a cell's files."""
        return self.out / "cells" / cell.name

    def prepare(self) -> int:
        """Check the trace, claim the folder and return the number of requests in all cells.

        Raises ReplayError, and OtherSettings for results of other settings.
        """
        trace = load_trace(self.settings)
        self.results.claim(self.settings.fingerprint())
        return len(self.cells) * len(trace.requests)

    @property
    def results(self) -> ResultFolder:
        """Folder of the results."""
        return ResultFolder(self.out, "cells")

    def run(self, *, num_jobs: int, report: Callable[[CellResult], None]) -> list[CellResult]:
        """Run the cells that are not finished and return all, in the order of `cells`.

        `report` is called with each result. With several jobs each cell runs in a process of its own; all end at the
        first error, which is raised, or the first interrupt. Finished cells stay.
        """
        done: dict[ReplayCell, CellResult] = {}
        for result in self._finished(num_jobs):
            done[result.cell] = result
            report(result)
        return [done[cell] for cell in self.cells]

    def _finished(self, num_jobs: int) -> Iterator[CellResult]:
        missing: list[ReplayCell] = []
        for cell in self.cells:
            earlier = read_cell(cell, self.folder(cell))
            if earlier is None:
                missing.append(cell)
            else:
                self.num_ended.value += earlier.summary.figures.num_requests
                yield earlier
        if num_jobs == 1 or len(missing) <= 1:
            _count_in(self.num_ended)
            for cell in missing:
                yield run_cell(self.settings, cell, self.folder(cell))
        else:
            tasks = [(self.settings, cell, self.folder(cell)) for cell in missing]
            count = partial(_count_in, self.num_ended)
            yield from in_processes(run_cell, tasks, num_jobs=num_jobs, prepare=count)
