"""Changes the pools' sizes while the cluster serves.

1. Where one pool shrinks and the other grows, workers flip (`flipping`).
2. New workers are started side by side and warmed (`processes.evacuation`), until the routers use them.
3. Workers to be stopped drain: the routers give them nothing new and move their answers to others (`SetWorkers`).
4. When a worker is empty, or its grace is over, its hottest prefixes move to others (`processes.evacuation`).
5. It leaves the membership and is stopped. Requests that it still had are resumed elsewhere from their tokens, as after
   a worker's death.

Pools grow before they shrink, so that capacity never falls below both sizes. A change that is cancelled ends where it
is: workers that are not in use yet are removed, those that drain get requests again, the others stay as they are.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from cluster.changes.flipping import flip_obstacle, flip_workers
from cluster.planner.plan import Pool
from cluster.processes.launcher import StartFailed
from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import (
    POOLS,
    THREAD_ENVS,
    PlanError,
    ProcessRole,
    ProcessSpec,
    sizes_of,
    with_living_names,
    with_sizes,
)
from cluster.processes.workforce import Workforce
from common.config import ServingConfig
from common.errors import EngineFault, InvalidRequest

logger = logging.getLogger(__name__)

MAX_WORKERS = 1024
_MAX_STARTS = 4
"""Workers that start on one host at a time: each loads a model and measures its core."""
Report = Callable[[str], None]
PlanFor = Callable[[ServingConfig], Sequence[ProcessSpec]]
"""Returns the processes of a configuration on the hosts of the cluster. Raises PlanError."""


class Times:
    """The latest durations of one kind of change in each pool; guessed before any is measured."""

    def __init__(self, guess_s: float) -> None:
        self._guess_s = guess_s
        self._latest: dict[str, deque[float]] = {role.value: deque(maxlen=9) for role in POOLS}

    def note(self, role: ProcessRole, seconds: float) -> None:
        """Add a measured duration."""
        self._latest[role.value].append(seconds)

    def medians(self) -> dict[Pool, float]:
        """Return the median durations."""
        return {pool: median(self._latest[pool.value] or [self._guess_s]) for pool in Pool}


class Scaler:
    """Brings pools to their wanted sizes. Event loop only.

    Callers ensure that no two changes of a pool run at the same time (`change.Changes`).
    """

    def __init__(self, config: ServingConfig, workforce: Workforce, plan_for: PlanFor) -> None:
        self.config = self._first = config
        """The configuration of new workers; `adopt` changes it."""
        self._own: ServingConfig | None = None
        """The configuration of new workers, once it differs from the launcher's."""
        self._workforce = workforce
        self._plan_for = plan_for
        self.start_times = Times(30.0)
        """From the request for a worker to its use."""
        self.drain_times = Times(5.0)
        """From the order to drain a worker to its end."""

    async def scale(
        self, wanted: Mapping[ProcessRole, int], *, grace_s: float, report: Report, no_flip: bool = False
    ) -> None:
        """Bring the named pools to these sizes; `report` is called with each step.

        Workers change pools before others are started or stopped, but for `no_flip`.
        Raises InvalidRequest, EngineFault if a worker does not start: those that started stay then, none is stopped.
        """
        check_sizes(wanted)
        await self.resize(wanted, grace_s, report, no_flip=no_flip)

    # The steps of a change.

    def adopt(self, config: ServingConfig) -> None:
        """Start workers from now on with another configuration than the launcher's."""
        self.config = self._own = config

    def sizes(self) -> dict[ProcessRole, int]:
        """Return how many workers each pool has."""
        return {role: len(self._workforce.workers(role)) for role in POOLS}

    async def resize(
        self, wanted: Mapping[ProcessRole, int], grace_s: float, report: Report, *, no_flip: bool = False
    ) -> None:
        """Bring the named pools to these sizes; the others are not touched. Raises InvalidRequest, EngineFault."""
        try:
            if not no_flip and wanted.keys() >= set(POOLS):
                obstacle = partial(flip_obstacle, first=self._first, latest=self.config)
                await flip_workers(self._workforce, wanted, obstacle=obstacle, grace_s=grace_s, report=report)
            specs = [spec for spec in self.plan(self.config, self.sizes() | dict(wanted)) if spec.role in wanted]
            await self.grow(specs, report)
            await self.shrink(self._present(wanted) - {spec.name for spec in specs}, grace_s, report)
        except asyncio.CancelledError:
            report(f"stays at {in_words({role: size for role, size in self.sizes().items() if role in wanted})}")
            raise

    def plan(self, config: ServingConfig, sizes: Mapping[ProcessRole, int]) -> list[ProcessSpec]:
        """Return the workers of a configuration with these pool sizes. Raises InvalidRequest."""
        pools = config.pools
        if config.launcher == "local" and (pools.prefill.num_gpus or pools.decode.num_gpus):
            raise InvalidRequest(
                "cannot scale pools with GPUs: launcher: local assigns these once, at its start; use launcher: ray",
                field="pools",
            )
        own = self._own if config is self.config else config
        try:
            planned = self._plan_for(with_sizes(config, sizes))
        except PlanError as error:
            raise InvalidRequest(str(error), field="pools") from error
        living = {role: [process.spec for process in self._workforce.workers(role)] for role in POOLS}
        workers = [replace(spec, config=own) for spec in planned if spec.role in POOLS]
        return with_living_names(workers, living)

    def plan_beside(self, config: ServingConfig) -> list[ProcessSpec]:
        """Return all workers of a configuration, to run beside the present ones. Raises InvalidRequest.

        Memory is divided among both sets; threads, which the old set soon does not need, among the new one alone.
        """
        wanted = sizes_of(config)
        together = {role: size + wanted[role] for role, size in self.sizes().items()}
        alone = {spec.role: spec.env for spec in self.plan(config, wanted)}
        new = [spec for spec in self.plan(config, together) if spec.name not in self._present()]
        return [replace(spec, env={**spec.env, **{key: alone[spec.role][key] for key in THREAD_ENVS}}) for spec in new]

    def _present(self, pools: Collection[ProcessRole] = POOLS) -> set[str]:
        return {process.spec.name for role in pools for process in self._workforce.workers(role)}

    async def grow(self, specs: Sequence[ProcessSpec], report: Report) -> None:
        """Start the missing workers, a few side by side on one host; returns when the routers use them.

        Raises EngineFault.
        """
        coming = [spec for spec in specs if spec.name not in self._present()]
        if not coming:
            return
        report(f"starting {', '.join(spec.name for spec in coming)}")
        started_s = time.monotonic()
        is_one_host = all(spec.host is not None for spec in coming)
        places = asyncio.Semaphore(_MAX_STARTS if is_one_host else len(coming))
        done = await asyncio.gather(*(self._add(spec, places, report) for spec in coming), return_exceptions=True)
        for spec, failure in zip(coming, done, strict=True):
            if isinstance(failure, StartFailed):
                raise cannot_start(spec, failure)
            if isinstance(failure, BaseException):
                raise failure
        warmed = [f"{spec.name} warmed with {num} blocks" for spec, num in zip(coming, done, strict=True) if num]
        report("; ".join([f"{len(coming)} in use after {time.monotonic() - started_s:.1f} s", *warmed]))

    async def _add(self, spec: ProcessSpec, places: asyncio.Semaphore, report: Report) -> int:
        async with places:
            started_s = time.monotonic()
            num_warmed = await self._workforce.add_worker(spec, report)
            self.start_times.note(spec.role, time.monotonic() - started_s)
        return num_warmed

    async def shrink(self, going: set[str], grace_s: float, report: Report) -> None:
        """Drain and stop the named workers, side by side."""
        processes = [each for role in POOLS for each in self._workforce.workers(role) if each.spec.name in going]
        if processes:
            report(f"draining {', '.join(sorted(going))}")
            leaving = (self._let_go(process, grace_s, report) for process in processes)
            done = await asyncio.gather(*leaving, return_exceptions=True)  # so that all have ended, also if cancelled
            for failure in filter(None, done):
                raise failure

    async def _let_go(self, process: ManagedProcess, grace_s: float, report: Report) -> None:
        started_s = time.monotonic()
        try:
            num_left = await self._workforce.drain_worker(process, grace_s=grace_s)
            took_s = time.monotonic() - started_s
            num_moved = await self._workforce.evacuate_worker(process, grace_s=max(0.0, grace_s - took_s))
        except asyncio.CancelledError:
            self._workforce.keep_worker(process)
            raise
        took = f"{took_s:.2f} s"
        await self._workforce.remove_worker(process)
        self.drain_times.note(process.spec.role, time.monotonic() - started_s)
        if num_left:
            logger.warning(
                "worker stopped before it was empty", extra={"service": process.spec.name, "num_left": num_left}
            )
            report(f"{process.spec.name} has stopped; {num_left} requests were left after {took} and resume elsewhere")
        else:
            moved = f"; {num_moved} blocks of its hottest prefixes moved to others" if num_moved else ""
            report(f"{process.spec.name} has stopped; it was empty after {took}{moved}")


def cannot_start(spec: ProcessSpec, failure: StartFailed) -> EngineFault:
    """Return the error of a change for a process that did not start."""
    return EngineFault(f"cannot start {spec.name}: {str(failure).removeprefix(f'{spec.name}: ')}")


def in_words(sizes: Mapping[ProcessRole, int]) -> str:
    """Return pool sizes as the command line takes them."""
    return " ".join(f"{role}={size}" for role, size in sizes.items())


def check_sizes(wanted: Mapping[ProcessRole, int]) -> None:
    """Raise InvalidRequest for pool sizes that no cluster can have."""
    for role, size in wanted.items():
        if size > MAX_WORKERS:
            raise InvalidRequest(f"{size} workers; at most {MAX_WORKERS}", field=str(role))
    if wanted.get(ProcessRole.DECODE, 1) < 1:
        raise InvalidRequest("0; at least one worker must decode", field=str(ProcessRole.DECODE))
