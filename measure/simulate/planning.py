"""Runs a planner in a simulation as the controller does: observes, plans, carries out."""

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from cluster.planner.plan import Observation, ObservedWorker, Planner, Pool
from common.demand import Demand, merge_demands
from measure.simulate.loop import VirtualLoop
from measure.simulate.pools import PoolSlot, SimPools
from measure.simulate.records import Elasticity
from router.parts import RouterParts

_GUESSED_DRAIN_S = 5.0
"""Guess before any worker has left."""


class PlanningLoop:
    """Plans at a steady interval. Event loop only."""

    def __init__(
        self,
        loop: VirtualLoop,
        pools: SimPools,
        routers: Sequence[RouterParts],
        elasticity: Elasticity,
    ) -> None:
        self._loop = loop
        self._pools = pools
        self._routers = routers
        self._elasticity = elasticity
        self._planner: Planner = elasticity.make_planner()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Plan after every interval."""
        if self._elasticity.slo is not None:
            for router in self._routers:
                router.orchestrator.demand.judge_by(self._elasticity.slo)
        self._task = self._loop.create_task(self._run())

    async def stop(self) -> None:
        """Stop planning. Changes that are under way go on."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._elasticity.interval_s)
            plan = self._planner.plan(self.observe())
            if plan.sizes != self._pools.sizes:
                self._pools.carry_out(plan, self._elasticity)

    def observe(self) -> Observation:
        """Return the planner's input."""
        elasticity = self._elasticity
        return Observation(
            now_s=self._loop.time(),
            demand=merge_demands([_demand_of(router, elasticity.demand_window_s) for router in self._routers]),
            workers=tuple(self._observed(place) for place in self._pools.places),
            startup_s=dict.fromkeys(Pool, elasticity.startup_s),
            drain_s={pool: self._drain_s(pool) for pool in Pool},
        )

    def _observed(self, place: PoolSlot) -> ObservedWorker:
        """Return a worker as the first router knows it; all routers hear the same."""
        worker_id = place.endpoint.worker_id
        worker, member = place.worker, self._routers[0].fleet.members_by_id.get(worker_id)
        unknown = ObservedWorker(
            worker_id=worker_id,
            pool=place.pool,
            phase=place.phase,
            timing=None,
            num_running=0,
            num_waiting=0,
            num_pending_prefill_tokens=0,
            num_context_tokens=0,
            num_blocks=0,
            num_free_blocks=0,
            block_size=0,
        )
        facts = None if member is None else member.facts
        if worker is None or member is None or facts is None:
            return unknown
        report = member.report
        return replace(
            unknown,
            timing=member.timing,
            num_running=report.num_running,
            num_waiting=report.num_waiting + report.num_reserved,
            num_pending_prefill_tokens=report.num_pending_prefill_tokens,
            num_context_tokens=report.num_context_tokens,
            num_blocks=facts.num_blocks,
            num_free_blocks=report.num_free_blocks,
            block_size=facts.block_size,
            max_running=worker.runtime.pool_config.max_running,
            num_tier_blocks=report.num_tier_blocks,
            max_tier_blocks=report.max_tier_blocks,
            block_bytes=facts.block_bytes,
        )

    def _drain_s(self, pool: Pool) -> float:
        """Return the mean drain time of workers that have left, without changes of the pool."""
        times = [
            stay.gone_s - stay.leaving_s
            for stay in self._pools.stays
            if stay.pool is pool and stay.leaving_s is not None and stay.gone_s is not None
            if stay.gone_s > stay.leaving_s
        ]
        return statistics.fmean(times[-8:]) if times else _GUESSED_DRAIN_S


def _demand_of(router: RouterParts, window_s: float) -> Demand:
    line = router.line
    return router.orchestrator.demand.demand(
        window_s, num_queued=line.num_queued, num_queued_tokens=line.num_queued_tokens
    )
