"""Changes the pools' sizes while the cluster serves.

1. Where one pool shrinks and the other grows, workers change over (`flipping`).
2. Workers that are to come are started, side by side, and warmed (`evacuation`), until the router uses them.
3. Those that are to go drain: the router gives them nothing new and moves what they decode to others (`SetWorkers`).
4. When nothing runs on one any more, or its grace is over, its hottest prefixes move to others (`evacuation`).
5. It leaves the membership and is stopped. What was left is resumed elsewhere from its tokens, like after a worker's
   death.

Growing comes first, so that capacity never falls below both sizes.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from cluster.changes.change_times import ChangeTimes
from cluster.changes.flipping import Flips, flip_obstacle, flip_workers
from cluster.processes.launcher import StartFailed
from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import THREAD_ENVS, PlanError, ProcessRole, ProcessSpec, with_sizes
from cluster.processes.worker_names import with_living_names
from common.config import ServingConfig
from common.errors import EngineFault, InvalidRequest, Overloaded

logger = logging.getLogger(__name__)

MAX_WORKERS = 1024
POOLS = (ProcessRole.PREFILL, ProcessRole.DECODE)
Report = Callable[[str], None]
PlanFor = Callable[[ServingConfig], Sequence[ProcessSpec]]
"""Returns the processes of a configuration, on the hosts that the cluster has. Raises PlanError."""


class Workforce(Protocol):
    """The workers of a running cluster: the supervisor."""

    def workers(self, role: ProcessRole) -> Sequence[ManagedProcess]:
        """Return a pool, whoever should go first at the end (`worker_names.home_first`)."""

    async def add_worker(self, spec: ProcessSpec) -> int:
        """Start one more and warm it; returns with how many blocks, when the routers use it.

        Raises StartFailed, and then nothing is left of it.
        """

    async def drain_router(self, process: ManagedProcess, *, grace_s: float) -> None:
        """Have a router take nothing new and serve what it has, for so long at most."""

    async def drain_worker(self, process: ManagedProcess, *, grace_s: float) -> int:
        """Let a worker give its requests away; returns how many it still had when the grace was over."""

    async def flip_worker(self, process: ManagedProcess, role: ProcessRole, *, grace_s: float) -> None:
        """Give a drained worker the other role; returns when the routers use it.

        Raises EngineFault when they do not, another KvrelayError when the worker still has its old role, and serves.
        """

    async def evacuate_worker(self, process: ManagedProcess, *, grace_s: float) -> int:
        """Move the hottest prefixes of a drained worker to those that stay; returns how many blocks moved."""

    async def remove_worker(self, process: ManagedProcess) -> None:
        """Take a worker out of the membership and stop it."""


class Scaler:
    """Brings pools to their wanted sizes, one request after the other. Event loop only."""

    def __init__(self, config: ServingConfig, workforce: Workforce, plan_for: PlanFor) -> None:
        self._config = self._first = config
        self._own: ServingConfig | None = None
        """The same, once it is not the launcher's any more."""
        self._workforce = workforce
        self._plan_for = plan_for
        self._lock = asyncio.Lock()
        self.times = ChangeTimes()
        """What starts and drains took."""

    async def scale(
        self, wanted: Mapping[ProcessRole, int], *, grace_s: float, report: Report, flips: Flips = Flips.FIRST
    ) -> None:
        """Bring the named pools to these sizes; `report` hears of each step.

        Raises InvalidRequest, Overloaded while another change runs, EngineFault when a worker does not start: those
        that did start stay then, and nobody goes.
        """
        sizes = self.sizes() | dict(wanted)
        _check(sizes)
        async with self.changing():
            await self.resize(sizes, grace_s, report, flips)

    async def restart(self, *, grace_s: float, report: Report) -> None:
        """Replace every worker by a new process, one after the other; one more than usual runs meanwhile.

        Raises like `scale`; what was replaced by then stays replaced.
        """
        sizes = self.sizes()
        async with self.changing():
            for role in (role for role in POOLS if sizes[role]):
                old = [process.spec for process in self._workforce.workers(role)]
                # It takes the place of whoever is away.
                await self.grow(self.plan(self._config, sizes | {role: sizes[role] + 1}), report)
                for spec in old:
                    await self.shrink({spec.name}, grace_s, report)
                    await self.grow([spec], report)
                extra = {process.spec.name for process in self._workforce.workers(role)} - {spec.name for spec in old}
                await self.shrink(extra, grace_s, report)

    # The steps that a change is made of. Callers hold `changing`.

    @property
    def config(self) -> ServingConfig:
        """What new workers serve by."""
        return self._config

    def adopt(self, config: ServingConfig) -> None:
        """Have workers that come from now on serve by another configuration than the launcher's."""
        self._config = self._own = config

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Change the pools inside the block. Raises Overloaded while somebody else does."""
        if self._lock.locked():
            raise Overloaded("another change of the pools is under way", retry_after_s=5.0)
        async with self._lock:
            yield

    def sizes(self) -> dict[ProcessRole, int]:
        """Return how many workers each pool has."""
        return {role: len(self._workforce.workers(role)) for role in POOLS}

    async def resize(
        self, sizes: Mapping[ProcessRole, int], grace_s: float, report: Report, flips: Flips = Flips.FIRST
    ) -> None:
        """Bring both pools to these sizes. Raises InvalidRequest, EngineFault."""
        if flips is Flips.FIRST:
            obstacle = partial(flip_obstacle, first=self._first, latest=self._config)
            await flip_workers(self._workforce, sizes, obstacle=obstacle, grace_s=grace_s, report=report)
        specs = self.plan(self._config, sizes)
        await self.grow(specs, report)
        await self.shrink(self._present() - {spec.name for spec in specs}, grace_s, report)

    def plan(self, config: ServingConfig, sizes: Mapping[ProcessRole, int]) -> list[ProcessSpec]:
        """Return the workers of a configuration with these pool sizes. Raises InvalidRequest."""
        pools = config.pools
        if config.launcher == "local" and (pools.prefill.num_gpus or pools.decode.num_gpus):
            raise InvalidRequest(
                "launcher: local deals out the GPUs at its start; launcher: ray can scale", field="pools"
            )
        own = self._own if config is self._config else config
        try:
            planned = self._plan_for(with_sizes(config, sizes))
        except PlanError as error:
            raise InvalidRequest(str(error), field="pools") from error
        living = {role: [process.spec for process in self._workforce.workers(role)] for role in POOLS}
        workers = [replace(spec, config=own) for spec in planned if spec.role in POOLS]
        return with_living_names(workers, living)

    def plan_beside(self, config: ServingConfig) -> list[ProcessSpec]:
        """Return all workers of a configuration, to run beside those that are there. Raises InvalidRequest.

        Memory is dealt out for both sets; threads, of which the old set soon needs none, for the new one alone.
        """
        wanted = {role: getattr(config.pools, role).count for role in POOLS}
        together = {role: size + wanted[role] for role, size in self.sizes().items()}
        alone = {spec.role: spec.env for spec in self.plan(config, wanted)}
        new = [spec for spec in self.plan(config, together) if spec.name not in self._present()]
        return [replace(spec, env={**spec.env, **{key: alone[spec.role][key] for key in THREAD_ENVS}}) for spec in new]

    def _present(self) -> set[str]:
        return {process.spec.name for role in POOLS for process in self._workforce.workers(role)}

    async def grow(self, specs: Sequence[ProcessSpec], report: Report) -> None:
        """Start those that are not there, side by side; returns when the router uses them. Raises EngineFault."""
        coming = [spec for spec in specs if spec.name not in self._present()]
        if not coming:
            return
        report(f"starting {', '.join(spec.name for spec in coming)}")
        started_s = time.monotonic()
        done = await asyncio.gather(*(self._add(spec) for spec in coming), return_exceptions=True)
        for spec, failure in zip(coming, done, strict=True):
            if isinstance(failure, StartFailed):
                raise EngineFault(f"{spec.name} did not start: {failure}")
            if isinstance(failure, BaseException):
                raise failure
        warmed = [f"{spec.name} warmed with {num} blocks" for spec, num in zip(coming, done, strict=True) if num]
        report("; ".join([f"{len(coming)} in use after {time.monotonic() - started_s:.1f} s", *warmed]))

    async def _add(self, spec: ProcessSpec) -> None:
        started_s = time.monotonic()
        await self._workforce.add_worker(spec)
        self.times.note_start(spec.role, time.monotonic() - started_s)

    async def shrink(self, going: set[str], grace_s: float, report: Report) -> None:
        """Drain and stop the named workers, side by side."""
        processes = [each for role in POOLS for each in self._workforce.workers(role) if each.spec.name in going]
        if processes:
            report(f"draining {', '.join(sorted(going))}")
            await asyncio.gather(*(self._let_go(process, grace_s, report) for process in processes))

    async def _let_go(self, process: ManagedProcess, grace_s: float, report: Report) -> None:
        started_s = time.monotonic()
        num_left = await self._workforce.drain_worker(process, grace_s=grace_s)
        took_s = time.monotonic() - started_s
        took = f"{took_s:.2f} s"
        num_moved = await self._workforce.evacuate_worker(process, grace_s=max(0.0, grace_s - took_s))
        await self._workforce.remove_worker(process)
        self.times.note_drain(process.spec.role, time.monotonic() - started_s)
        if num_left:
            logger.warning(
                "worker went before it was empty", extra={"service": process.spec.name, "num_left": num_left}
            )
            report(
                f"{process.spec.name} is gone; {num_left} requests had not moved after {took} and are resumed elsewhere"
            )
        else:
            left = f", and left {num_moved} blocks of its hottest prefixes to others" if num_moved else ""
            report(f"{process.spec.name} is gone; it was empty after {took}{left}")


def _check(sizes: Mapping[ProcessRole, int]) -> None:
    for role, size in sizes.items():
        if size > MAX_WORKERS:
            raise InvalidRequest(f"{size} workers; at most {MAX_WORKERS}", field=str(role))
    if sizes[ProcessRole.DECODE] < 1:
        raise InvalidRequest("0; somebody has to write the answers", field=str(ProcessRole.DECODE))
