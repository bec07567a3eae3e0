"""Refuses to make pools too small for their present load."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.changes.observing import Ask, make_observation
from cluster.changes.scaling import Scaler
from cluster.planner.capacity import rate_of
from cluster.planner.evidence import ShapeMemory, measure, objectives_of
from cluster.planner.observation import Observation, Pool, WorkerPhase
from cluster.planner.settings import DECODE_HELP, Limits, PlannerSettings
from cluster.processes.plan import ProcessRole
from cluster.processes.workforce import Workforce
from common.clock import Clock
from common.config import ServingConfig
from common.errors import InvalidRequest
from common.slo import Slo

_WINDOW_S = 30.0
"""Long enough to count requests, short enough for the present load."""
_MIN_WINDOW_S = 20.0
"""Shortest observation of a load that pools are judged by."""


def planner_settings(config: ServingConfig) -> PlannerSettings:
    """Return the planner's settings from serving.yaml."""
    slo, planner, router = config.slo, config.planner, config.router
    decode_helps = router.policy == "predictive" and router.local_prefill_max_tokens == "auto"
    return PlannerSettings(
        decode_help=DECODE_HELP if decode_helps else 0.0,
        slo=Slo(ttft_s=slo.ttft_s, itl_s=slo.itl_s, ttft_tokens=slo.ttft_tokens),
        attainment=planner.attainment,
        prefill=Limits(smallest=planner.min_prefill, largest=planner.max_prefill),
        decode=Limits(smallest=planner.min_decode, largest=planner.max_decode),
        max_workers=planner.max_workers,
        max_utilization=planner.max_utilization,
        interval_s=planner.interval_s,
        stable_s=planner.stable_s,
        cooldown_s=planner.cooldown_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGuard:
    """Compares wanted pool sizes with the present load. Event loop only."""

    scaler: Scaler
    workforce: Workforce
    ask: Ask
    clock: Clock

    async def check(self, wanted: Mapping[ProcessRole, int]) -> None:
        """Raise InvalidRequest if a pool would shrink below what the load needs. Without evidence all sizes pass."""
        present = self.scaler.sizes()
        shrinking = {Pool(role.value): size for role, size in wanted.items() if size < present[role]}
        if not shrinking or (reports := await self.ask(_WINDOW_S)) is None:
            return
        observed = make_observation(reports, self.workforce, self.scaler, now_s=self.clock.monotonic())
        short = _shortfall(observed, shrinking, planner_settings(self.scaler.config))
        if short is not None:
            raise InvalidRequest(f"{short}; --force does it anyway")


def _shortfall(observed: Observation, sizes: Mapping[Pool, int], settings: PlannerSettings) -> str | None:
    """Return why pools of these sizes are too small for the present load; None if they are not, or without evidence.

    Only the named pools are judged.
    """
    demand = observed.demand
    if demand.window_s < _MIN_WINDOW_S or len(demand.shapes) < settings.min_shapes:
        return None
    memory = ShapeMemory(memory_s=settings.memory_s)
    memory.add(observed.now_s, demand)
    objectives = objectives_of(settings.slo, attainment=settings.attainment, max_utilization=settings.max_utilization)
    capacities = measure(observed, memory.shapes, objectives=objectives)
    if isinstance(capacities, str):
        return None
    rate = demand.num_arrived / demand.window_s
    num_decode = sizes.get(Pool.DECODE, observed.count(Pool.DECODE, WorkerPhase.SERVING))
    prefill = capacities.prefill.helped_by(settings.decode_help * capacities.decode.num_spare(num_decode, rate))
    for pool, size in sizes.items():
        carried = rate_of(prefill if pool is Pool.PREFILL else capacities.decode, size)
        if carried < rate:
            return (
                f"{size} {pool} workers would carry {carried:.2f} requests/s within the objectives,"
                f" and {rate:.2f} came each second in the last {demand.window_s:.0f} s"
            )
    return None
