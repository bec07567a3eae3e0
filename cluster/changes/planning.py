"""The planner of a running cluster: its settings, its autopilot, and a guard of the pools' sizes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from cluster.changes.autopilot import Autopilot
from cluster.changes.change import Changes
from cluster.changes.observing import Ask, ask_routers, make_observation
from cluster.changes.room import HostRoom, measure_room
from cluster.changes.scaling import Scaler
from cluster.planner.capacity import rate_of
from cluster.planner.evidence import ShapeMemory, measure, objectives_of
from cluster.planner.plan import DECODE_HELP, Observation, PlannerSettings, Pool, PoolLimits, WorkerPhase
from cluster.planner.slo_planner import SloPlanner
from cluster.processes.launcher import StartFailed
from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import ProcessRole
from cluster.processes.workforce import Workforce
from common.clock import Clock, SystemClock
from common.config import PoolConfig, ServingConfig
from common.errors import InvalidRequest
from common.metrics_server import MetricsServer, ScrapeTls
from common.ports import address_of
from common.slo import Slo

logger = logging.getLogger(__name__)

_WINDOW_S = 30.0
"""Observed time: long enough to count requests, short enough to describe the present load."""
_MIN_WINDOW_S = 20.0
"""Shortest observation of a load that pools are judged by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeGuard:
    """Compares wanted pool sizes with the present load, and with the room on a cluster's only host. Event loop only."""

    scaler: Scaler
    workforce: Workforce
    ask: Ask
    clock: Clock
    measure_room: Callable[[Iterable[ManagedProcess], Iterable[PoolConfig]], HostRoom | None] = measure_room

    async def check(self, wanted: Mapping[ProcessRole, int]) -> None:
        """Raise InvalidRequest if a pool would shrink below what the load needs, or grow beyond its host.

        Without evidence all sizes pass.
        """
        present = self.scaler.sizes()
        self._check_room(present, wanted)
        shrinking = {Pool(role.value): size for role, size in wanted.items() if size < present[role]}
        if not shrinking or (reports := await self.ask(_WINDOW_S)) is None:
            return
        observed = make_observation(reports, self.workforce, self.scaler, now_s=self.clock.monotonic())
        short = _shortfall(observed, shrinking, planner_settings(self.scaler.config))
        if short is not None:
            raise InvalidRequest(f"{short}; --force does it anyway")

    def _check_room(self, present: Mapping[ProcessRole, int], wanted: Mapping[ProcessRole, int]) -> None:
        growing = [role for role, size in wanted.items() if size > present[role]]
        after = {**present, **wanted}
        if not growing or sum(after.values()) <= sum(present.values()):
            return
        workers = (worker for role in present for worker in self.workforce.workers(role))
        pools = (getattr(self.scaler.config.pools, role) for role in growing)
        room = self.measure_room(workers, pools)
        if room is None or sum(after.values()) <= room.num_fitting:
            return
        role = max(growing, key=lambda each: wanted[each] - present[each])
        most = max(present[role], room.num_fitting - sum(after.values()) + after[role])
        raise InvalidRequest(
            f"cannot run {wanted[role]} {role} workers: this host has {room}; ask for at most {most}, or add --force",
            field=str(role),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A cluster's planner, and its guard against sizes that do not fit load or host."""

    autopilot: Autopilot
    guard: SizeGuard
    config: ServingConfig
    scrape_tls: ScrapeTls | None = None

    @asynccontextmanager
    async def running(self, stopping: asyncio.Event) -> AsyncIterator[None]:
        """Plan while the block runs, until `stopping` is set. Raises StartFailed if the metrics' port is taken."""
        port, host = self.config.planner.metrics_port, self.config.router.host
        if port is None or self.autopilot.is_off:
            async with self.autopilot.running(stopping):
                yield
            return
        try:
            server = MetricsServer(self.autopilot.gauges.registry, host=host, port=port, tls=self.scrape_tls)
        except OSError as error:
            address = address_of(host, port)
            raise StartFailed(f"planner.metrics_port: cannot listen on {address}: {error.strerror}") from error
        logger.info("planner's metrics", extra={"port": server.port})
        try:
            async with self.autopilot.running(stopping):
                yield
        finally:
            await asyncio.to_thread(server.close)


def make_planning(
    scaler: Scaler, workforce: Workforce, changes: Changes, *, scrape_tls: ScrapeTls | None = None
) -> Planning:
    """Return the planner of a cluster, not running yet."""
    ask = partial(ask_routers, addresses=lambda: workforce.routers.admin_addresses, connect=workforce.reach.router)
    clock, planner = SystemClock(), SloPlanner(planner_settings(scaler.config))
    return Planning(
        autopilot=Autopilot(scaler, workforce, changes, planner=planner, ask=ask, clock=clock),
        guard=SizeGuard(scaler=scaler, workforce=workforce, ask=ask, clock=clock),
        config=scaler.config,
        scrape_tls=scrape_tls,
    )


def planner_settings(config: ServingConfig) -> PlannerSettings:
    """Return the planner's settings from serving.yaml."""
    slo, planner, router = config.slo, config.planner, config.router
    decode_helps = router.policy == "predictive" and router.local_prefill_max_tokens == "auto"
    return PlannerSettings(
        decode_help=DECODE_HELP if decode_helps else 0.0,
        slo=Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, ttft_tokens=slo.ttft_tokens),
        attainment=planner.attainment,
        prefill=PoolLimits(smallest=planner.min_prefill, largest=planner.max_prefill),
        decode=PoolLimits(smallest=planner.min_decode, largest=planner.max_decode),
        max_workers=planner.max_workers,
        max_utilization=planner.max_utilization,
        interval_s=planner.interval_s,
        stable_s=planner.stable_s,
        cooldown_s=planner.cooldown_s,
    )


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
