"""Whether pools of a certain size would carry what is asked of them now."""

from collections.abc import Mapping

from cluster.planner.capacity import rate_of
from cluster.planner.evidence import ShapeMemory, measure, objectives_of
from cluster.planner.observation import Observation, Pool, WorkerPhase
from cluster.planner.settings import PlannerSettings

MIN_WINDOW_S = 20.0
"""A load that was seen for less is no load to judge by."""


def shortfall(observed: Observation, sizes: Mapping[Pool, int], settings: PlannerSettings) -> str | None:
    """Return in words why pools of these sizes are too small for the present load; None: they are not, or who knows.

    Only the pools that are named are judged.
    """
    demand = observed.demand
    if demand.window_s < MIN_WINDOW_S or len(demand.shapes) < settings.min_shapes:
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
