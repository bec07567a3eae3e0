"""Simulated arms: the router and workers that serve, on hardware that is not here, under a virtual clock.

A cell takes an arm's serving.yaml as a real one does: pools, pages, budgets, policy. Times of steps, copies and
messages come from a roofline or from timings fitted on real workers. Equal cells give equal points.
"""

import heapq
import math
import statistics
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from common.config import PoolConfig
from common.slo import Slo
from engine.pages.window_pages import split_budget
from measure.experiment.arms import ArmPlan
from measure.experiment.ended import count_request
from measure.experiment.points import Cell, PaidWorkers, Point, Source, point_of
from measure.experiment.prepare import SimulatedWorkloads
from measure.experiment.runner import CellFailed, Measure
from measure.experiment.spec import ExperimentError, ExperimentSpec
from measure.experiment.store import CLOCK_FILE
from measure.load.records import RequestRecord
from measure.load.window import NothingMeasured, Window, find_window
from measure.simulate.cluster import run
from measure.simulate.executor import sim_shape
from measure.simulate.planners import planning_by
from measure.simulate.records import Arrival, ClusterShape, NetworkShape, SimRun, SimSettings, TierShape
from measure.simulate.roofline import Hardware, UnknownHardware
from measure.simulate.routers import routers_of
from measure.simulate.store import write_json, write_requests
from measure.simulate.timing import TimingFileError, WindowPageSize
from measure.workload.content import ContentWriter
from measure.workload.sessions import Segment, Session, Turn, Workload
from router.tenants import ANYBODY, Tenant

_RETURN_S = 1.0
"""Time until the place of a refused session is taken."""
_ANSWERS = 1 << 62
"""First number of the answers' contents, above those of any workload."""
_DEFAULT_KV_TOKENS = 3000 * 512
"""KV of a worker that chooses the size of its pool itself."""
_MAX_MODEL_LEN = 1 << 20
_NUM_SAMPLES = 200
"""Samples of the workers in a run."""
_REQUESTS_PER_S = 60.0
"""Rough speed of a simulation on one core; for forecasts only."""
_TOLERATED = 0.1
"""Share by which fewer requests than expected may come without a warning."""


class Users:
    """All users of one simulated run: sessions as requests that follow from each other. Iterate over `arrivals` once.

    Open loop: a session's first request arrives at its time, whatever became of others. Closed loop: a fixed number of
    sessions run at any time, and the next one begins when one has ended. In both, a later turn arrives its think time
    after the answer before, and its prompt begins with the whole conversation. A session ends with a request that is
    not complete, since the rest of the conversation is not known. In a closed loop its place is taken a little later:
    refused sessions would otherwise follow each other without any time passing.
    """

    def __init__(
        self, workload: Workload, *, slo: Slo, max_tokens: int | None = None, are_tenants: bool = False
    ) -> None:
        """`max_tokens`: limit that every request states, all that a router knows; None: the answer's length.

        `are_tenants`: every stream is a tenant of its own.
        """
        self._workload = workload
        self._writer = ContentWriter(seed=workload.seed)
        self._slo = slo
        self._max_tokens = max_tokens
        self._are_tenants = are_tenants
        self._num_begun = 0
        """Requests of the sessions that have begun, sent or not."""
        self._num_answers = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the first request of every session that follows from no other session, in order of time."""
        closed = [stream for stream in self._workload.streams if stream.concurrency is not None]
        for stream in closed:
            sessions = iter(stream.sessions)
            for _ in range(stream.concurrency or 0):
                first = self._next_of(sessions, 0.0)
                if first is not None:
                    yield first
        opened = [stream.sessions for stream in self._workload.streams if stream.concurrency is None]
        for session in heapq.merge(*opened, key=lambda session: session.start_s):
            if not self._may_begin(session.start_s):
                return
            yield self._begin(session, session.start_s, None)

    def _may_begin(self, at_s: float) -> bool:
        most = self._workload.max_requests
        return at_s <= self._workload.duration_s and (most is None or self._num_begun < most)

    def _next_of(self, sessions: Iterator[Session], at_s: float) -> Arrival | None:
        """Return the first request of a closed loop's next session; None when it may not begin."""
        session = next(sessions, None) if self._may_begin(at_s) else None
        return None if session is None else self._begin(session, at_s, sessions)

    def _begin(self, session: Session, at_s: float, line: Iterator[Session] | None) -> Arrival:
        self._num_begun += len(session.turns)
        return self._turn(session, 0, array("I"), at_s, line)

    def _turn(
        self, session: Session, index: int, history: "array[int]", at_s: float, line: Iterator[Session] | None
    ) -> Arrival:
        """Return a session's request; the request that follows from it is made when it has ended.

        `line`: the closed loop's next sessions; None: an open loop.
        """
        turn = session.turns[index]
        is_last = index + 1 == len(session.turns)
        prompt = history + self._writer.tokens(turn.segments)
        answer = None if is_last else self._answer(turn)

        def follow_up(result: RequestRecord) -> Arrival | None:
            if answer is not None and result.is_complete:
                think_s = session.turns[index + 1].think_s
                return self._turn(session, index + 1, prompt + answer, result.end_s + think_s, line)
            if line is None:
                return None
            return self._next_of(line, result.end_s + (0.0 if result.is_complete else _RETURN_S))

        return Arrival(
            at_s=at_s,
            prompt=prompt,
            num_output_tokens=turn.num_output_tokens,
            max_tokens=None if self._max_tokens is None else max(self._max_tokens, turn.num_output_tokens),
            answer=answer,
            session=session.index,
            turn=index,
            ttft_slo_s=self._slo.ttft_of(len(prompt)),
            kind=session.kind,
            tenant=Tenant(name=session.kind) if self._are_tenants else ANYBODY,
            follow_up=None if is_last and line is None else follow_up,
        )

    def _answer(self, turn: Turn) -> "array[int]":
        """Return an answer that differs from all others."""
        self._num_answers += 1
        return self._writer.tokens([Segment(_ANSWERS + self._num_answers, turn.num_output_tokens)])


def simulate_point(plan: ArmPlan, workload: Workload, spec: ExperimentSpec, cell: Cell) -> tuple[Point, SimRun]:
    """Serve a cell's workload on a simulated arm and return the results.

    Blocks, some ten milliseconds of a core for each request; needs a thread without a running loop. Raises
    CellFailed when no request counts, ExperimentError when the arm cannot be simulated.
    """
    simulated = plan.simulated
    shape, settings = simulation_of(plan, spec)
    settings = replace(settings, seed=workload.seed, sample_interval_s=_sample_interval_s(workload, cell.load))
    max_tokens = spec.simulate.max_tokens
    if simulated.policy is not None:
        routers = routers_of(simulated.policy)
        settings = routers.replacing(settings)
        max_tokens = None if routers.is_perfect else max_tokens
    if simulated.planner is not None:
        settings = replace(settings, elasticity=planning_by(simulated.planner, spec.objectives))
    users = Users(workload, slo=spec.objectives, max_tokens=max_tokens, are_tenants=simulated.tenants)
    finished = run(shape, settings, users.arrivals(), progress=count_request)
    try:
        window = find_window(finished.requests, warm_up_s=spec.warm_up_s, cool_down_s=None)
    except NothingMeasured as error:
        raise CellFailed(str(error)) from error
    point = point_of(finished, window, arm=plan.arm, cell=cell, source=Source.SIMULATED, slo=spec.objectives)
    warnings = _warnings(window.num_counted, cell.load * (window.end_s - window.start_s))
    return replace(point, paid=_paid(finished, window), warnings=warnings), finished


def _paid(finished: SimRun, window: Window) -> PaidWorkers:
    stays = finished.stays
    num_flips = sum(stay.is_flipped for stay in stays)
    return PaidWorkers(
        worker_s=sum(stay.paid_s(until_s=window.end_s) for stay in stays),
        num_starts=sum(stay.asked_s > 0 for stay in stays) - num_flips,
        num_flips=num_flips,
        num_leaves=sum(stay.leaving_s is not None for stay in stays) - num_flips,
        num_moves=finished.num_moves,
    )


def _warnings(num_counted: int, num_expected: float) -> tuple[str, ...]:
    """Return why fewer requests count than the load says, unless that is by chance."""
    if num_counted < (1 - _TOLERATED) * num_expected - 3 * math.sqrt(num_expected):
        return ("far fewer requests than the load came: the warm-up is too short for its sessions",)
    return ()


def _sample_interval_s(workload: Workload, load: float) -> float:
    expected_s = workload.duration_s
    if workload.max_requests is not None:
        expected_s = min(expected_s, workload.max_requests / load)
    return expected_s / _NUM_SAMPLES


def simulation_of(plan: ArmPlan, spec: ExperimentSpec) -> tuple[ClusterShape, SimSettings]:
    """Return the simulated cluster of an arm, and its settings. Raises ExperimentError."""
    arm, serving = plan.arm, plan.serving
    assert serving is not None, "external servers are not simulated"
    prefill, decode = serving.pools.prefill, serving.pools.decode
    first = prefill if arm.num_prefill else decode
    for key in ("block_size", "num_blocks", "kv_memory_gib", "max_running", "max_waiting"):
        if getattr(first, key) != getattr(decode, key):
            raise ExperimentError(f"{arm.name}: pools.prefill.{key} must be as in pools.decode to be simulated")
    simulate = spec.simulate
    hardware = Hardware(model=simulate.model, device=simulate.device, timing_file=simulate.timing)
    try:
        prefill_pace, link, kv = hardware.pace(first.max_step_tokens)
        decode_pace, _, _ = hardware.pace(decode.max_step_tokens)
    except UnknownHardware as error:
        raise ExperimentError(f"simulate.{error}") from error
    except (TimingFileError, OSError) as error:
        raise ExperimentError(str(error)) from error
    block_bytes = decode.block_size * kv.bytes_per_token
    if simulate.tiers and kv.windows is not None:
        raise ExperimentError("simulate.tiers: a model with windows, or with states, has no simulated tiers")
    shape = ClusterShape(
        num_prefill=arm.num_prefill,
        num_decode=arm.num_decode,
        num_routers=serving.router.count,
        num_blocks=_num_blocks(decode, block_bytes, kv.windows),
        block_size=decode.block_size,
        block_bytes=block_bytes,
        windows=kv.windows,
        tiers=tuple(
            TierShape(num_blocks=tier.blocks(block_bytes), bytes_per_s=tier.gb_per_s * 1e9) for tier in simulate.tiers
        ),
        max_step_tokens=first.max_step_tokens,
        decode_step_tokens=decode.max_step_tokens,
        max_running=decode.max_running,
        max_waiting=decode.max_waiting,
        max_model_len=serving.model.max_model_len or _MAX_MODEL_LEN,
    )
    return shape, SimSettings(
        prefill=prefill_pace,
        decode=decode_pace,
        network=NetworkShape(kv_bytes_per_s=link.bytes_per_s),
        router=serving.router,
        report_interval_s=simulate.report_interval_s,
        event_lag_s=simulate.event_lag_s,
        tpot_slo_s=spec.slo.tpot_s,
    )


def _num_blocks(pool: PoolConfig, block_bytes: int, windows: WindowPageSize | None) -> int:
    if pool.num_blocks is not None:
        return pool.num_blocks
    if pool.kv_memory_gib != "auto":
        kv_bytes = int(pool.kv_memory_gib * 2**30)
        if windows is None:
            return kv_bytes // block_bytes
        shape = sim_shape(block_size=pool.block_size, block_bytes=block_bytes, windows=windows)
        return split_budget(kv_bytes, shape, pool.max_step_tokens)[0]
    return max(2, _DEFAULT_KV_TOKENS // pool.block_size)


class SimulatedBench:
    """An experiment's arms under a virtual clock; see `measure.experiment.runner.Bench`."""

    source = Source.SIMULATED

    def __init__(self, spec: ExperimentSpec, workloads: SimulatedWorkloads) -> None:
        self._spec = spec
        self._workloads = workloads

    @contextmanager
    def serve(self, plan: ArmPlan) -> Iterator[Measure]:
        """Yield the function that measures the arm's cells, each on workers of its own."""
        yield partial(self._measure, plan)

    def seconds(self, num_cells: int, num_starts: int) -> float:
        """Return the approximate time of so many cells; starts take none."""
        num_requests = statistics.fmean(load * self._duration_s(load) for load in self._spec.loads)
        return num_cells * num_requests / _REQUESTS_PER_S

    def _duration_s(self, load: float) -> float:
        """Return the time in which requests arrive, including the warm-up: longer at low loads, for enough of them."""
        return self._spec.warm_up_s + max(self._spec.duration_s, self._spec.simulate.min_requests / load)

    def _measure(self, plan: ArmPlan, cell: Cell, folder: Path) -> Point:
        workload = self._workloads.simulated(cell, seconds=self._duration_s(cell.load))
        point, finished = simulate_point(plan, workload, self._spec, cell)
        write_requests(folder / "requests.jsonl", finished.requests)
        write_json(folder / "workers.json", [asdict(worker) for worker in finished.workers])
        write_json(folder / CLOCK_FILE, asdict(finished.clock))
        return point
