"""Simulated arms: the router and workers that serve, on hardware that is not here, under a virtual clock.

A cell takes an arm's serving.yaml as a real one does: pools, pages, budgets, policy. Times of steps, copies and
messages come from a roofline or from timings fitted on real workers. Equal cells give equal points.
"""

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from common.config import PoolConfig
from common.timing import StepShape
from engine.pages.window_pages import split_budget
from measure.experiment.arms import ArmPlan
from measure.experiment.ended import count_request
from measure.experiment.points import Cell, LoadUnit, PaidWorkers, Point, Source, point_of
from measure.experiment.prepare import SimulatedWorkloads
from measure.experiment.runner import CellFailed, Measure
from measure.experiment.spec import ExperimentError, ExperimentSpec
from measure.experiment.store import CLOCK_FILE
from measure.experiment.users import Users
from measure.load.window import NothingMeasured, Window, find_window
from measure.simulate.cluster import run
from measure.simulate.executor import sim_shape
from measure.simulate.planners import planning_by
from measure.simulate.records import ClusterShape, NetworkShape, SimRun, SimSettings, TierShape
from measure.simulate.roofline import Hardware, UnknownHardware
from measure.simulate.routers import routers_of
from measure.simulate.store import write_json, write_requests
from measure.simulate.timing import TimingFileError, WindowPageSize
from measure.workload.sessions import Workload

_DEFAULT_KV_TOKENS = 3000 * 512
"""KV of a worker that chooses the size of its pool itself."""
_MAX_MODEL_LEN = 1 << 20
_NUM_SAMPLES = 200
"""Samples of the workers in a run."""
_SAMPLE_S = 30.0
"""Time between two samples where the duration is not known."""
_REQUESTS_PER_S = 60.0
"""Rough speed of a simulation on one core; for forecasts only."""
_TOLERATED = 0.1
"""Share by which fewer requests than expected may come without a warning."""


def simulate_point(
    plan: ArmPlan, workload: Workload, spec: ExperimentSpec, cell: Cell, *, load_unit: LoadUnit = LoadUnit.REQUESTS
) -> tuple[Point, SimRun]:
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
    users = Users(
        workload,
        slo=spec.objectives,
        max_tokens=max_tokens,
        are_tenants=simulated.tenants,
        idle=partial(idle_seconds, shape, settings),
    )
    finished = run(shape, settings, users.arrivals(), progress=count_request)
    try:
        window = find_window(finished.requests, warm_up_s=spec.warm_up_s, cool_down_s=None)
    except NothingMeasured as error:
        raise CellFailed(str(error)) from error
    goals = spec.goals(load_unit)
    point = point_of(finished, window, arm=plan.arm, cell=cell, source=Source.SIMULATED, goals=goals)
    is_rate = load_unit is LoadUnit.REQUESTS
    warnings = _warnings(window.num_counted, cell.load * (window.end_s - window.start_s)) if is_rate else ()
    return replace(point, paid=_paid(finished, window), warnings=warnings), finished


def idle_seconds(
    shape: ClusterShape, settings: SimSettings, num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int
) -> float:
    """Return the time of a request that is alone in the cluster, whose cache has so many tokens of its prompt.

    Computing the rest of the prompt and every further token takes steps of its own; messages take their latency, and
    the KV moves while the prompt is computed.
    """
    num_before = num_cached_tokens // shape.block_size * shape.block_size
    seconds = 2 * settings.network.latency_s
    while num_before < num_prompt_tokens:
        num_tokens = min(shape.max_step_tokens, num_prompt_tokens - num_before)
        pairs = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
        seconds += settings.prefill.times.step_s(StepShape(num_prefill_tokens=num_tokens, num_prefill_pairs=pairs))
        num_before += num_tokens
    step_s, per_context_token_s = settings.decode.times.decode_line(1)
    num_steps = num_output_tokens - 1
    context = num_steps * num_prompt_tokens + num_steps * (num_steps + 1) // 2
    return seconds + num_steps * step_s + context * per_context_token_s


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
    if math.isinf(workload.duration_s):
        return _SAMPLE_S
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
        counts = (self._workloads.num_requests(load, seconds=self._duration_s(load)) for load in self._spec.loads)
        known = [count for count in counts if count is not None]
        return num_cells * statistics.fmean(known) / _REQUESTS_PER_S if known else 0.0

    def _duration_s(self, load: float) -> float:
        """Return the time in which requests arrive, including the warm-up: longer at low loads, for enough of them."""
        least_s = self._spec.simulate.min_requests / load if self._workloads.load_unit is LoadUnit.REQUESTS else 0.0
        return self._spec.warm_up_s + max(self._spec.duration_s, least_s)

    def _measure(self, plan: ArmPlan, cell: Cell, folder: Path) -> Point:
        workload = self._workloads.simulated(cell, seconds=self._duration_s(cell.load))
        point, finished = simulate_point(plan, workload, self._spec, cell, load_unit=self._workloads.load_unit)
        write_requests(folder / "requests.jsonl", finished.requests)
        write_json(folder / "workers.json", [asdict(worker) for worker in finished.workers])
        write_json(folder / CLOCK_FILE, asdict(finished.clock))
        return point
