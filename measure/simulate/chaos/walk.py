"""One walk: a cluster, its clients, and a storm of faults."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from common.config import PoolConfig, PoolsConfig, RouterConfig, ServingConfig, TransferConfig
from common.ids import RequestId, seeded_ids
from engine.fake import FakeExecutor
from engine.kv_store import KvShape
from kv_tiers.tiers import Tiers, TierSettings
from measure.simulate.chaos.audit import GONE_S, Audit
from measure.simulate.chaos.clients import Clients
from measure.simulate.chaos.host import Host
from measure.simulate.chaos.oracles import leftovers
from measure.simulate.chaos.poison import PoisonBook
from measure.simulate.chaos.questions import QuestionBook
from measure.simulate.chaos.reading import Readers
from measure.simulate.chaos.routers import ChaosRouters
from measure.simulate.chaos.settings import NETWORK_FAULTS, ChaosReport, ChaosSettings, FaultKind
from measure.simulate.chaos.storm import Storm
from measure.simulate.faults import SeededFaults
from measure.simulate.loop import VirtualClock, VirtualLoop, collecting_rarely, ending_on_faults
from measure.simulate.network import SimNetwork
from measure.simulate.records import NetworkShape
from measure.simulate.tokens import TokenLog
from measure.simulate.wire import PageBytes
from measure.simulate.worker import SharedWorld, endpoints, simulated_reach
from router.fleet.member import WorkerState
from router.parts import RouterParts, build_router

BLOCK_SIZE = 8
DRAIN_BOUND_S = 60.0
"""Time from the end of all faults within which every request must have ended, every router must have every worker
again, and everything must have been released.

A lost message or a cut is noticed after 5 s, when the keepalive breaks the connection; a hung step ends after 10 s with
its process, which is back 3 s later. A chain of two such failures and the work itself fit in a minute. It is also how
long a request that has lost its worker waits for a plan (`router.recovery_timeout_s`).
"""
_WARM_UP_S = 10.0
_LOOK_S = 0.5


def run_walk(settings: ChaosSettings, *, progress: Callable[[int], None] | None = None) -> ChaosReport:
    """Run a walk. Blocks; needs a thread without a running loop. Raises the errors of bugs."""
    with collecting_rarely(), seeded_ids(settings.seed), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_walk(settings, progress))


async def _walk(settings: ChaosSettings, progress: Callable[[int], None] | None) -> ChaosReport:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    with ending_on_faults(loop):
        walk = _Walk(loop, settings)
        await walk.start()
        await walk.serve_all(progress)
        return await walk.finish()


class _Walk:
    """A cluster in a storm. Event loop only."""

    def __init__(self, loop: VirtualLoop, settings: ChaosSettings) -> None:
        self._loop = loop
        self._settings = settings
        self._draw = random.Random(settings.seed)
        self._faults = SeededFaults(settings.rates, seed=self._draw.getrandbits(32), now_s=loop.time)
        self._faults.is_quiet = True
        self._network = SimNetwork(
            loop, NetworkShape(kv_bytes_per_s=1e6), pages=PageBytes(block=0), faults=self._faults
        )
        self._config = _config(settings)
        self._endpoints = endpoints(settings.num_prefill, settings.num_decode)
        self._poisons = PoisonBook(VirtualClock(loop))
        self._report = ChaosReport()
        self._audit = Audit(self._report)
        self._hosts = self._make_hosts()
        addresses = [f"router-{number}:1" for number in range(settings.num_routers)]
        may_die = FaultKind.ROUTER_CRASH in settings.faults
        self._routers = ChaosRouters(addresses, self._make_router, self._network, may_die=may_die)
        self._looks_at_s = 0.0
        self._running: dict[asyncio.Task[None], None] = {}
        book = QuestionBook(self._draw, block_size=BLOCK_SIZE, has_long_answers=settings.has_long_answers)
        readers = Readers(settings, self._audit, self._network.connect_from("client:1"))
        self._clients = Clients(self._draw, settings, book, self._poisons, self._routers, readers)
        self._storm = Storm(
            *(self._draw, settings, self._network), hosts=self._hosts, routers=self._routers, clients=self._clients
        )

    def _make_hosts(self) -> list[Host]:
        world = SharedWorld(
            loop=self._loop, network=self._network, config=self._config, log=TokenLog(), report_interval_s=0.05
        )

        def model(number: int) -> tuple[FakeExecutor, Tiers | None]:
            num_blocks, num_tier_blocks = self._settings.num_blocks, self._settings.num_tier_blocks
            executor = FakeExecutor(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_steps_in_flight=1 + number % 2)
            return executor, _tiers(executor.kv.shape, num_tier_blocks) if num_tier_blocks else None

        return [
            Host(
                *(endpoint, world, lambda number=number: model(number), self._poisons),
                draw_down_s=lambda: self._draw.uniform(0.0, self._settings.max_down_s),
                on_tokens=partial(self._audit.take, endpoint.worker_id),
            )
            for number, endpoint in enumerate(self._endpoints)
        ]

    def _make_router(self, address: str) -> RouterParts:
        reach = simulated_reach(self._network.connect_from(address))
        router = build_router(self._config.router, clock=VirtualClock(self._loop), reach=reach)
        self._audit.watch_bookings(router)
        return router

    async def start(self) -> None:
        """Start workers and routers."""
        for host in self._hosts:
            host.start()
        for router in self._routers.alive.values():
            router.fleet.set_workers(self._endpoints)
        self._routers.start()
        await asyncio.sleep(_WARM_UP_S)

    async def serve_all(self, progress: Callable[[int], None] | None) -> None:
        """Send all requests in a storm that ends with the last one, and wait for the last reply."""
        self._faults.is_quiet = False
        self._storm.start()
        num_ended = 0

        def ended(task: "asyncio.Task[None]") -> None:
            nonlocal num_ended
            del self._running[task]
            if not task.cancelled():
                task.result()
            self._look_for_idle_work()
            num_ended += 1
            if progress is not None:
                progress(num_ended)

        for number in range(self._settings.num_requests):
            await asyncio.sleep(self._draw.expovariate(self._settings.rate_per_s))
            client = self._clients.ask_once(self._routers.for_client(number))
            task = self._loop.create_task(client, name=f"client {number}")
            self._running[task] = None
            task.add_done_callback(ended)
        self._faults.is_quiet = True
        await self._storm.stop()
        over_s = self._loop.time()
        if self._running:
            _done, late = await asyncio.wait(self._running, timeout=DRAIN_BOUND_S)
            for task in late:
                self._violate(f"{task.get_name()} is not served {DRAIN_BOUND_S:g} s after the last fault")
                task.cancel()
            if late:
                await asyncio.wait(late)
        self._report.drain_s = self._loop.time() - over_s

    def _look_for_idle_work(self) -> None:
        """Look a little later whether a worker still has something for a client that has gone."""
        if self._settings.faults & NETWORK_FAULTS or self._looks_at_s > self._loop.time():
            return
        self._looks_at_s = self._loop.time() + GONE_S
        well = [host for host in self._hosts if host.is_well]

        def work(host: Host) -> Counter[RequestId]:
            are_all_well = all(other.is_well for other in self._hosts)
            return self._audit.work_for_nobody(host.worker.engine.core, with_held=are_all_well)

        before = {host: work(host) for host in well}

        def look() -> None:
            for host in well:
                lasting = before[host] & work(host)
                if host.is_well and lasting:
                    self._violate(f"{host.endpoint.worker_id} goes on with {sorted(lasting)}, whose clients have gone")

        self._loop.call_at(self._looks_at_s, look)

    async def finish(self) -> ChaosReport:
        """Wait until everything is whole, then close the cluster and report what is not."""
        report, faults = self._report, self._faults
        report.faults.update(
            {
                FaultKind.LOST: faults.num_lost,
                FaultKind.REPEATED: faults.num_repeated,
                FaultKind.LATE: faults.num_late,
                FaultKind.STALL: faults.num_stalls,
                FaultKind.CORRUPTED: faults.num_corrupted,
                FaultKind.TORN: faults.num_torn,
                FaultKind.POISON: self._poisons.num_all_deaths,
            }
        )
        report.faults += Counter()  # drops the kinds that never happened
        report.num_replans = self._routers.num_replans
        over_s = self._loop.time() - report.drain_s
        for missing in await self._within_bound(self._missing_workers):
            self._violate(missing)
        report.whole_s = self._loop.time() - over_s
        for left in await self._within_bound(self._leftovers):
            self._violate(left)
        report.virtual_s = self._loop.time()
        await self._close()
        for left in await self._within_bound(self._left_behind):
            self._violate(left)
        return report

    async def _within_bound(self, look: Callable[[], list[str]]) -> list[str]:
        """Look until nothing is wrong; returns what still is at the bound."""
        ends_s = self._loop.time() + DRAIN_BOUND_S
        while self._loop.time() < ends_s:
            if not look():
                return []
            await asyncio.sleep(_LOOK_S)
        return look()

    def _missing_workers(self) -> list[str]:
        return [
            f"{address}: {member.endpoint.worker_id} is {member.state.value}: {member.why}"
            for address, router in self._routers.alive.items()
            for member in router.fleet.members_by_id.values()
            if member.state is not WorkerState.READY
        ] + [f"{host.endpoint.worker_id} is not well" for host in self._hosts if not host.is_well]

    def _leftovers(self) -> list[str]:
        found = leftovers([host.worker for host in self._hosts], self._routers.alive.values())
        # A router keeps up to two streams to each worker: updates, and decode calls.
        num_streams = 2 * len(self._routers.alive) * len(self._hosts)
        if self._network.num_calls > num_streams:
            found.append(f"{self._network.num_calls} calls are left; idle streams are {num_streams}")
        return found

    async def _close(self) -> None:
        await self._routers.aclose()
        for host in self._hosts:
            await host.aclose()

    def _left_behind(self) -> list[str]:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        counts = {"calls": self._network.num_calls, "tasks": len(others)}
        return [f"{count} {what} are left after the shutdown" for what, count in counts.items() if count]

    def _violate(self, what: str) -> None:
        self._report.violations.append(what)


def _config(settings: ChaosSettings) -> ServingConfig:
    pool = PoolConfig(
        block_size=BLOCK_SIZE,
        num_blocks=settings.num_blocks,
        max_step_tokens=32,
        max_running=12,
        max_waiting=32,
        metrics=False,
    )
    return ServingConfig(
        pools=PoolsConfig(prefill=pool, decode=pool),
        transfer=TransferConfig(transports=("grpc",), chunk_bytes=4096, lease_ttl_s=4.0),
        router=RouterConfig(metrics_port=None),
    )


def _tiers(shape: KvShape, num_blocks: int) -> Tiers:
    """Return a tier in memory with real bytes, under the worker's own code."""
    return Tiers.open(
        TierSettings(
            host_bytes=num_blocks * shape.block_bytes,
            disk_bytes=0,
            path=None,
            fingerprint=shape.fingerprint,
            block_bytes=shape.block_bytes,
        )
    )
