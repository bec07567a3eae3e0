"""Brings a running cluster to another *generation*: another model, or anything else that workers cannot share.

1. Start the whole second set of workers beside the first. No router knows it, and clients notice nothing.
2. Replace the routers, one at a time, by routers of the new generation on the same ports. Clients continue at another
   router meanwhile. An old router finishes the requests that it accepted with the old model, within the grace; later
   requests are served by the model of their router.
3. When all routers are new, the configuration becomes the cluster's, which cannot be undone.
4. Stop the old workers, which no router uses any more.

A process that does not start before step 3, or the change's cancellation, undoes everything: replaced routers get their
old configuration again, for which the old workers still run, and the new workers are stopped.

This is a blue-green deployment (Humble and Farley, Continuous Delivery, 2010, chapter 10).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from cluster.changes.scaling import Report, Scaler, cannot_start
from cluster.processes.launcher import StartFailed
from cluster.processes.plan import POOLS, ProcessRole, ProcessSpec
from cluster.processes.workforce import Workforce
from common.config import ServingConfig
from common.errors import EngineFault
from common.structured import completed


@dataclass(slots=True, kw_only=True)
class Changeover:
    """Replaces all workers and routers of a cluster. Used once; no other change runs meanwhile."""

    scaler: Scaler
    workforce: Workforce
    keep: Callable[[], None]
    """Makes the new configuration the one that processes start with from now on."""
    grace_s: float
    report: Report
    _renewed: list[ProcessSpec] = field(default_factory=list, init=False)
    """Specs of the old routers that were removed, in order."""

    async def run(self, config: ServingConfig) -> None:
        """Bring the cluster to `config` and its pool sizes. Raises EngineFault after undoing everything."""
        old = {process.spec.name for role in POOLS for process in self.workforce.workers(role)}
        routers = [process.spec for process in self.workforce.workers(ProcessRole.ROUTER)]
        new = self.scaler.plan_beside(config)
        try:
            await self.scaler.grow(new, self.report)
            for spec in routers:
                self._renewed.append(spec)
                await self._renew_router(replace(spec, config=config))
        except (EngineFault, asyncio.CancelledError) as error:
            await go_back(error, partial(self._undo, new), workforce=self.workforce, report=self.report)
        self.keep()
        self.report("every router uses the new workers alone")
        await completed(self.scaler.shrink(old, self.grace_s, self.report))

    async def _undo(self, new: Sequence[ProcessSpec]) -> None:
        steps = [partial(self._renew_router, spec) for spec in reversed(self._renewed)]
        going = {spec.name for spec in new}
        await undo_all([*steps, partial(self.scaler.shrink, going, self.grace_s, self.report)], self.report)

    async def _renew_router(self, spec: ProcessSpec) -> None:
        """Let the old router finish its requests first: it may be the last one of its model."""
        for process in self.workforce.workers(ProcessRole.ROUTER):
            if process.spec.name == spec.name:
                self.report(f"{spec.name} finishes its requests")
                await self.workforce.drain_router(process, grace_s=self.grace_s)
        await renew_router(self.workforce, spec, self.report)


async def go_back(
    cause: EngineFault | asyncio.CancelledError,
    undo: Callable[[], Coroutine[Any, Any, None]],
    *,
    workforce: Workforce,
    report: Report,
) -> NoReturn:
    """Undo what a change has done so far, to the end, and raise the cause, or EngineFault if that fails.

    A cluster that is being stopped is left as it is.
    """
    is_cancelled = isinstance(cause, asyncio.CancelledError)
    if workforce.phase.is_end:
        raise cause
    report(f"going back: {'cancelled' if is_cancelled else cause}")
    await completed(undo())
    report("the old configuration serves")
    if is_cancelled:
        raise cause
    raise EngineFault(f"rolled back, the old configuration serves: {cause}") from cause


async def undo_all(steps: Sequence[Callable[[], Awaitable[None]]], report: Report) -> None:
    """Take every step, also after one fails. Raises EngineFault in the end for the first failure."""
    failures: list[EngineFault] = []
    for step in steps:
        try:
            await step()
        except EngineFault as error:
            report(f"a step back failed: {error}")
            failures.append(error)
    if failures:
        raise EngineFault(f"only partly rolled back: {failures[0]}")


async def renew_router(workforce: Workforce, spec: ProcessSpec, report: Report) -> None:
    """Replace the router of that name by a new one on the same port. Raises EngineFault."""
    report(f"replacing {spec.name}")
    for process in workforce.workers(ProcessRole.ROUTER):
        if process.spec.name == spec.name:
            await workforce.remove_worker(process)
    try:
        await workforce.add_worker(spec, report)
    except StartFailed as error:
        raise cannot_start(spec, error) from error
