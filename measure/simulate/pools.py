"""The workers of a simulated cluster as they start, change their pool, and leave.

    STARTING ──startup_s──▶ SERVING ──asked to go────▶ DRAINING ──empty, or grace_s over──▶ gone

As in a real cluster (`cluster/changes/scaling.py`), routers learn of changes by their membership alone, and their own
code moves requests off a draining worker. Growing and shrinking go on side by side.

A worker that changes its pool has two places: the old one, DRAINING, and one in the other pool that is STARTING until
the old one is empty and `flip_s` have passed. It keeps its name and its cache.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace

from cluster.planner.plan import Pool, PoolSizes, ScalingPlan, WorkerPhase
from common.errors import Overloaded
from common.ids import WorkerId
from measure.simulate.loop import VirtualLoop
from measure.simulate.records import Elasticity, Stay
from measure.simulate.worker import ROLES, SimWorker, pool_endpoint
from router.fleet.facts import WorkerEndpoint
from router.parts import RouterParts

_LOOK_S = 0.25
"""Interval at which a draining worker is checked."""
_MAX_LOOKS_AT_PULLS = 20
"""Number of checks for which an unused worker waits for pulls from it to end."""
_OTHER = {Pool.PREFILL: Pool.DECODE, Pool.DECODE: Pool.PREFILL}


@dataclass(slots=True, eq=False)
class PoolSlot:
    """A worker's place in a pool."""

    endpoint: WorkerEndpoint
    phase: WorkerPhase
    stay: Stay
    worker: SimWorker | None = None
    """The worker; None before it serves."""

    @property
    def pool(self) -> Pool:
        """Pool of the place."""
        return self.stay.pool


class SimPools:
    """The workers and their changes. Event loop only."""

    def __init__(
        self, loop: VirtualLoop, make_worker: Callable[[WorkerEndpoint], SimWorker], routers: Sequence[RouterParts]
    ) -> None:
        self._loop = loop
        self._make_worker = make_worker
        self._routers = routers
        self._places: dict[PoolSlot, None] = {}
        self._ended: list[SimWorker] = []
        self._num_named = dict.fromkeys(Pool, 0)
        self._tasks: dict[PoolSlot, asyncio.Task[None]] = {}
        self.begin_s = 0.0
        """Virtual time that stays call 0."""
        self.workers: list[SimWorker] = []
        """All workers that ever served, in order of their starts."""
        self.stays: list[Stay] = []
        """Stays of all workers that were ever paid, in the order in which they were asked for."""

    @property
    def places(self) -> Collection[PoolSlot]:
        """Places that are paid now."""
        return self._places.keys()

    @property
    def sizes(self) -> PoolSizes:
        """Workers that serve or start, without draining ones."""
        return PoolSizes(prefill=len(self._staying(Pool.PREFILL)), decode=len(self._staying(Pool.DECODE)))

    def open(self, sizes: PoolSizes) -> None:
        """Start the initial workers, which serve at once."""
        for pool, size in ((Pool.PREFILL, sizes.prefill), (Pool.DECODE, sizes.decode)):
            for _ in range(size):
                place = self._add(pool, self._new_endpoint(pool))
                self._serve(place, self._made(place.endpoint))
        self._notify_routers()

    def carry_out(self, plan: ScalingPlan, elasticity: Elasticity) -> None:
        """Begin the changes to a plan's sizes: flips first, then starts and departures."""
        wanted = {Pool.PREFILL: plan.sizes.prefill, Pool.DECODE: max(1, plan.sizes.decode)}
        if elasticity.flip_s is not None:
            for pool in Pool:
                num_missing = wanted[pool] - len(self._staying(pool))
                num_spare = len(self._staying(_OTHER[pool])) - wanted[_OTHER[pool]]
                for _ in range(min(num_missing, num_spare)):
                    self._flip(_OTHER[pool], elasticity)
        for pool in Pool:
            staying = self._staying(pool)
            for place in staying[wanted[pool] :]:
                self._send_away(place, elasticity)
            for _ in range(wanted[pool] - len(staying)):
                place = self._add(pool, self._new_endpoint(pool))
                self._run(place, self._start(place, elasticity.startup_s))
        self._notify_routers()

    async def aclose(self) -> None:
        """Cancel all changes and close all workers."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        for worker in self.workers:
            if worker not in self._ended:
                await worker.aclose()

    # Changes.

    async def _start(self, place: PoolSlot, startup_s: float) -> None:
        await asyncio.sleep(startup_s)
        self._serve(place, self._made(place.endpoint))
        self._notify_routers()

    async def _leave(self, place: PoolSlot, worker: SimWorker, elasticity: Elasticity) -> None:
        ends_s = self._loop.time() + elasticity.grace_s
        await self._until_unused(place, worker, ends_s)
        self._remove(place)
        for _ in range(_MAX_LOOKS_AT_PULLS):
            if not worker.runtime.num_request_tasks or self._loop.time() >= ends_s:
                break
            await asyncio.sleep(_LOOK_S)
        place.stay.gone_s = self._now_s()
        await self._kill(worker)

    async def _change_pool(self, old: PoolSlot, new: PoolSlot, worker: SimWorker, elasticity: Elasticity) -> None:
        ends_s = self._loop.time() + elasticity.grace_s
        await self._until_unused(old, worker, ends_s)
        self._remove(old)
        try:
            await worker.change_role(new.endpoint.role, grace_s=max(_LOOK_S, ends_s - self._loop.time()))
        except Overloaded:  # not empty in time: it restarts in the other pool, without its cache
            await self._kill(worker)
            await asyncio.sleep(elasticity.startup_s)
            worker = self._made(new.endpoint)
        else:
            await asyncio.sleep(elasticity.flip_s or 0.0)
        if new.phase is WorkerPhase.DRAINING:  # sent away before it served
            self._remove(new)
            new.stay.gone_s = self._now_s()
            await self._kill(worker)
        else:
            self._serve(new, worker)
            self._notify_routers()

    def _flip(self, pool: Pool, elasticity: Elasticity) -> None:
        """Move one serving worker of a pool to the other pool, if there is one."""
        serving = [place for place in self._staying(pool) if place.worker is not None]
        if not serving:
            return
        old, worker = serving[-1], serving[-1].worker
        assert worker is not None, "it serves"
        old.phase = WorkerPhase.DRAINING
        old.stay.leaving_s = old.stay.gone_s = self._now_s()  # the new place is paid for from now on
        new = self._add(_OTHER[pool], replace(old.endpoint, role=ROLES[_OTHER[pool]]))
        new.stay.is_flipped = True
        self._run(new, self._change_pool(old, new, worker, elasticity))

    def _send_away(self, place: PoolSlot, elasticity: Elasticity) -> None:
        place.stay.leaving_s = self._now_s()
        place.phase = WorkerPhase.DRAINING
        if place.worker is not None:
            self._run(place, self._leave(place, place.worker, elasticity))
        elif not place.stay.is_flipped:  # a flipped one leaves once it has left its old place
            self._tasks.pop(place).cancel()
            self._remove(place)
            place.stay.gone_s = self._now_s()

    async def _until_unused(self, place: PoolSlot, worker: SimWorker, ends_s: float) -> None:
        """Wait until no router uses a draining worker, or until a time."""
        while self._num_users(place.endpoint.worker_id) and self._loop.time() < ends_s:
            worker.engine.hand_out()  # answers move after their next token, which may be held back
            await asyncio.sleep(_LOOK_S)

    async def _kill(self, worker: SimWorker) -> None:
        self._ended.append(worker)
        await worker.crash()

    # Bookkeeping.

    def _add(self, pool: Pool, endpoint: WorkerEndpoint) -> PoolSlot:
        stay = Stay(worker_id=endpoint.worker_id, pool=pool, asked_s=self._now_s())
        self.stays.append(stay)
        place = PoolSlot(endpoint, WorkerPhase.STARTING, stay)
        self._places[place] = None
        return place

    def _new_endpoint(self, pool: Pool) -> WorkerEndpoint:
        self._num_named[pool] += 1
        return pool_endpoint(pool, self._num_named[pool] - 1)

    def _made(self, endpoint: WorkerEndpoint) -> SimWorker:
        worker = self._make_worker(endpoint)
        self.workers.append(worker)
        worker.start()
        return worker

    def _serve(self, place: PoolSlot, worker: SimWorker) -> None:
        place.worker = worker
        place.phase = WorkerPhase.SERVING
        place.stay.serving_s = self._now_s()

    def _remove(self, place: PoolSlot) -> None:
        del self._places[place]
        self._notify_routers()

    def _notify_routers(self) -> None:
        """Send the routers the membership and its draining workers."""
        present = [place for place in self._places if place.worker is not None]
        draining = {place.endpoint.worker_id for place in present if place.phase is WorkerPhase.DRAINING}
        for router in self._routers:
            router.fleet.set_workers([place.endpoint for place in present], draining=draining)

    def _run(self, place: PoolSlot, change: Coroutine[None, None, None]) -> None:
        task = self._tasks[place] = self._loop.create_task(change)
        task.add_done_callback(lambda task: self._end_change(place, task))

    def _end_change(self, place: PoolSlot, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(place) is task:
            del self._tasks[place]
        if not task.cancelled():
            task.result()  # raises what a bug raised

    def _staying(self, pool: Pool) -> list[PoolSlot]:
        """Return a pool's places without draining ones, in order of their starts; starting ones are last."""
        staying = [p for p in self._places if p.pool is pool and p.phase is not WorkerPhase.DRAINING]
        return sorted(staying, key=lambda place: place.phase is WorkerPhase.STARTING)

    def _num_users(self, worker_id: WorkerId) -> int:
        return sum(router.fleet.members_by_id[worker_id].num_users for router in self._routers)

    def _now_s(self) -> float:
        return max(0.0, self._loop.time() - self.begin_s)
