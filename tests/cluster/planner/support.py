"""Observations of simulated clusters, and what a planner makes of them over time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from cluster.planner.plan import (
    Observation,
    ObservedWorker,
    PlannerSettings,
    Pool,
    PoolLimits,
    PoolSizes,
    ScalingPlan,
    WorkerPhase,
)
from cluster.planner.slo_planner import SloPlanner
from common.demand import Demand, RequestShape
from common.ids import WorkerId
from common.slo import Slo
from common.timing import StepModel, TimingModel

INTERVAL_S = 10.0
STARTUP_S = 40.0

# A prompt of 2048 tokens takes 0.25 s; a sequence adds 0.2 ms and its KV of 2048 tokens 0.2 ms to a step of 10 ms.
TIMING = TimingModel(
    prefill=StepModel(constant_s=0.01, per_prefill_token_s=1.025e-4, num_samples=100),
    decode=StepModel(constant_s=0.01, per_decode_s=2e-4, per_context_token_s=1e-7, num_samples=100),
    max_step_tokens=512,
)
SHAPE = RequestShape(num_prompt_tokens=2048, num_computed_tokens=2048, num_output_tokens=128)
SLO = Slo(ttft_s=1.0, tpot_s=0.03)
SETTINGS = PlannerSettings(
    slo=SLO,
    interval_s=INTERVAL_S,
    prefill=PoolLimits(smallest=1, largest=40),
    decode=PoolLimits(smallest=1, largest=40),
    max_workers=64,
)
ONE_EACH = PoolSizes(prefill=1, decode=1)


def make_demand(
    *, rate: float, window_s: float = INTERVAL_S, shapes: Sequence[RequestShape] = (SHAPE,) * 8, num_queued: int = 0
) -> Demand:
    num_arrived = round(rate * window_s)
    return Demand(
        window_s=window_s,
        num_arrived=num_arrived,
        num_refused=0,
        num_finished=num_arrived,
        num_good=num_arrived,
        shapes=tuple(shapes) if num_arrived else (),
        num_queued=num_queued,
        num_queued_tokens=num_queued * SHAPE.num_prompt_tokens,
        ttft_p90_s=0.4 if num_arrived else None,
        tpot_p90_s=0.012 if num_arrived else None,
    )


@cache
def make_worker(pool: Pool, number: int, phase: WorkerPhase = WorkerPhase.SERVING) -> ObservedWorker:
    return ObservedWorker(
        worker_id=WorkerId(f"{pool}-{number}"),
        pool=pool,
        phase=phase,
        timing=TIMING if phase is WorkerPhase.SERVING else None,
        num_running=0,
        num_waiting=0,
        num_pending_prefill_tokens=0,
        num_context_tokens=0,
        num_blocks=20_000,
        num_free_blocks=20_000,
        block_size=16,
    )


def make_observation(
    now_s: float,
    demand: Demand,
    sizes: PoolSizes,
    *,
    starting: Mapping[Pool, int] | None = None,
    startup_s: float = STARTUP_S,
) -> Observation:
    """Return an observation of `sizes` serving workers and further `starting` ones."""
    counts = {Pool.PREFILL: sizes.prefill, Pool.DECODE: sizes.decode}
    workers = [make_worker(pool, number) for pool, count in counts.items() for number in range(count)]
    for pool, count in (starting or {}).items():
        workers += [make_worker(pool, 1000 + number, WorkerPhase.STARTING) for number in range(count)]
    return Observation(
        now_s=now_s,
        demand=demand,
        workers=tuple(workers),
        startup_s=dict.fromkeys(Pool, startup_s),
        drain_s=dict.fromkeys(Pool, 5.0),
    )


class FakePools:
    """Pools that carry out plans: workers start and drain in their time. The clock is `now_s`."""

    def __init__(self, sizes: PoolSizes, *, startup_s: float = STARTUP_S) -> None:
        self.now_s = 0.0
        self._startup_s = startup_s
        self._serving = {Pool.PREFILL: sizes.prefill, Pool.DECODE: sizes.decode}
        self._starting: dict[Pool, list[float]] = {pool: [] for pool in Pool}

    @property
    def serving(self) -> PoolSizes:
        return PoolSizes(prefill=self._serving[Pool.PREFILL], decode=self._serving[Pool.DECODE])

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for pool, due in self._starting.items():
            self._serving[pool] += sum(time_s <= self.now_s for time_s in due)
            self._starting[pool] = [time_s for time_s in due if time_s > self.now_s]

    def observe(self, demand: Demand) -> Observation:
        starting = {pool: len(due) for pool, due in self._starting.items()}
        return make_observation(self.now_s, demand, self.serving, starting=starting, startup_s=self._startup_s)

    def carry_out(self, wanted: PoolSizes) -> None:
        for pool, size in ((Pool.PREFILL, wanted.prefill), (Pool.DECODE, wanted.decode)):
            change = size - self._serving[pool] - len(self._starting[pool])
            if change < 0:
                self._serving[pool] += change
            self._starting[pool] += [self.now_s + self._startup_s] * max(0, change)


def with_timing(observed: Observation, timing: TimingModel | None) -> Observation:
    workers = tuple(replace(worker, timing=timing) for worker in observed.workers)
    return replace(observed, workers=workers)


def run(
    planner: SloPlanner, pools: FakePools, demand_at: Callable[[float], Demand], *, duration_s: float
) -> list[tuple[float, PoolSizes, ScalingPlan]]:
    """Plan and carry out at every interval; returns (time, sizes that served, plan)."""
    history = []
    end_s = pools.now_s + duration_s
    while pools.now_s < end_s:
        pools.advance(INTERVAL_S)
        plan = planner.plan(pools.observe(demand_at(pools.now_s)))
        history.append((pools.now_s, pools.serving, plan))
        pools.carry_out(plan.sizes)
    return history


def settle(planner: SloPlanner, pools: FakePools, rate: float) -> PoolSizes:
    run(planner, pools, lambda _now_s: make_demand(rate=rate), duration_s=1500.0)
    return pools.serving


def settled(rate: float, start: PoolSizes = ONE_EACH) -> PoolSizes:
    return settle(SloPlanner(SETTINGS), FakePools(start), rate)
