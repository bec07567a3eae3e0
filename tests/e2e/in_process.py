"""A router in front of real workers with fake engines, or given ones, over real gRPC, all in this process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from common.config import ServingConfig, parse_config
from engine.events import StepSample
from engine.executor import Executor, ScheduledSequence
from engine.fake import FakeExecutor, FakeStep
from kvrelay.v1 import router_admin_pb2
from tests.builders import BLOCK_SIZE
from tests.served_router import TIMEOUT_S, ServedRouter, serving_router
from tests.worker.cluster import running_pool
from worker.serving import RunningWorker
from worker.timing import WorkerTiming

_SLOW_STEP_S = 0.4
"""Duration of a slow step: a worker still tells its status in time, and no watchdog takes the step for overdue."""
_MEASURED_S = 0.1
"""Longer steps are not measured, as slow ones would count in plans."""


class Pace:
    """Slows engines down in the middle of answers, so that on a busy machine, too, none ends before a test is ready."""

    def __init__(self) -> None:
        self._slow_from: int | None = None
        self._hurried = threading.Event()

    def slow_down(self, *, at: int) -> None:
        """Have every step that works on this token of an answer, or on a later one, take its time from now on."""
        self._hurried.clear()
        self._slow_from = at

    def hurry(self) -> None:
        """Have all steps be as fast as ever, the present ones included."""
        self._slow_from = None
        self._hurried.set()

    def before_step(self, batch: Sequence[ScheduledSequence]) -> None:
        """Wait as long as this step has to. Engine threads only."""
        at = self._slow_from
        if at is not None and any(item.token_index >= at for item in batch):
            self._hurried.wait(_SLOW_STEP_S)

    @staticmethod
    def leave_out_of(timing: WorkerTiming) -> None:
        """Keep what slow steps take out of a worker's measurements."""
        observe = timing.observe

        def observe_usual(samples: Iterable[StepSample]) -> None:
            observe(sample for sample in samples if sample.seconds < _MEASURED_S)

        timing.observe = observe_usual  # type: ignore[method-assign]


class PacedExecutor(FakeExecutor):
    """A fake engine at a test's pace."""

    def __init__(self, pace: Pace, *, num_blocks: int = 128, step_s: float = 0.0) -> None:
        super().__init__(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=1024, step_s=step_s)
        self._pace = pace

    def launch(self, batch: Sequence[ScheduledSequence]) -> FakeStep:
        self._pace.before_step(batch)
        return super().launch(batch)


@dataclass(slots=True, eq=False, kw_only=True)
class System(ServedRouter):
    """A router and its workers."""

    workers: dict[str, RunningWorker]
    endpoints: list[router_admin_pb2.WorkerEndpoint]
    pace: Pace
    """Pace of the fake engines, unless the test has given others."""

    async def kill(self, worker_id: str) -> None:
        """Break every connection of a worker, as its death would."""
        for server in self.workers[worker_id].servers.values():
            await server.grpc_server.stop(None)

    async def kill_router(self) -> None:
        """Break every connection of its clients, and so end what it runs at the workers, as a crash would."""
        await self.router.server.grpc_server.stop(None)

    async def drain(self, *worker_ids: str) -> dict[str, int]:
        """Send the router the workers and which of them drain; returns how many requests run on each that drains."""
        return dict((await self.use(self.endpoints, draining=worker_ids)).num_users)

    async def until_idle(self) -> None:
        """Wait until no living worker and no router holds anything."""
        async with asyncio.timeout(TIMEOUT_S), self.operator() as client:
            while True:
                status = await client.status()
                held = status.router.num_active + status.router.num_bookings + status.router.num_request_tasks
                for view in status.workers:
                    if view.status is not None:
                        held += view.status.num_used_blocks + view.status.num_request_tasks + view.status.num_leases
                if not held:
                    return
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running_system(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    router: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    tenants: Sequence[dict[str, Any]] = (),
    load: Callable[[], Executor] | None = None,
    **fake: Any,
) -> AsyncIterator[System]:
    """Start everything and wait until the router uses every worker.

    `fake` shapes the engines (`make_runtime`); with `load` each worker has an engine that it returns.
    """
    pace = Pace()
    shape = {name: fake.pop(name) for name in ("num_blocks", "step_s") if name in fake}
    names = [*(f"p{i}" for i in range(num_prefill)), *(f"d{i}" for i in range(num_decode))]
    fakes = {
        name: {"lease_ttl_s": TIMEOUT_S / 2, "executor": load() if load else PacedExecutor(pace, **shape), **fake}
        for name in names
    }
    async with serving_router(_config(router, model, tenants)) as served, running_pool(fakes, ends_empty=False) as pool:
        for worker in pool.workers.values():
            pace.leave_out_of(worker.runtime.timing)
        endpoints = pool.endpoints
        await served.until_used(endpoints)
        yield System(router=served.router, admin=served.admin, workers=pool.workers, endpoints=endpoints, pace=pace)


@asynccontextmanager
async def another_router(system: System, *, router: dict[str, Any] | None = None) -> AsyncIterator[System]:
    """Put one more router in front of the workers of a system; yields the system as that router has it."""
    async with serving_router(_config(router)) as served:
        await served.until_used(system.endpoints)
        yield replace(system, router=served.router, admin=served.admin)


def _config(
    router: dict[str, Any] | None, model: dict[str, Any] | None = None, tenants: Sequence[dict[str, Any]] = ()
) -> ServingConfig:
    # The engines share this process: on a busy machine it is silent for seconds.
    options = {"recovery_timeout_s": TIMEOUT_S, "http_port": None, "silence_s": 10.0, **(router or {})}
    if tenants:
        options |= {"auth": "api_key", "salt_secret": "s" * 32}
    sections = {"model": {"engine": "fake", **(model or {})}, "router": options, "tenants": list(tenants)}
    return parse_config(sections, source="test")
