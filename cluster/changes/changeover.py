"""Brings a running cluster to another model, or to what else old and new workers cannot share: another *generation*.

1. The whole second set of workers is started beside the first. No router knows it, and clients notice nothing.
2. The routers are replaced, one after the other, by routers of the new generation on the same ports. Clients go on at
   another one meanwhile: what an old router has accepted is finished by the old model, within the grace, later requests
   by whichever model their router has.
3. When all routers are new, the configuration is the cluster's: there is no way back, and it is what processes read
   that start from now on.
4. The old workers, which nobody uses any more, go.

A process that does not start before step 3 undoes everything: routers that were replaced get their old configuration
again, for which the old workers are still there, and the new workers go.

This is a blue-green deployment (Humble and Farley, Continuous Delivery, 2010, chapter 10).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cluster.changes.scaling import POOLS, Report, Scaler, Workforce
from cluster.processes.launcher import StartFailed
from cluster.processes.plan import ProcessRole, ProcessSpec
from common.config import ServingConfig
from common.errors import EngineFault


@dataclass(slots=True, kw_only=True)
class Changeover:
    """New workers and new routers for a whole cluster. One use; the caller holds `Scaler.changing`."""

    scaler: Scaler
    workforce: Workforce
    keep: Callable[[ServingConfig], None]
    """Write the configuration down where processes find it that start from now on."""
    grace_s: float
    report: Report
    _renewed: list[ProcessSpec] = field(default_factory=list, init=False)
    """The old routers that were taken away, in order."""

    async def run(self, config: ServingConfig) -> None:
        """Bring the cluster to `config` and its pool sizes. Raises EngineFault, and then it is as it was."""
        old = {process.spec.name for role in POOLS for process in self.workforce.workers(role)}
        routers = [process.spec for process in self.workforce.workers(ProcessRole.ROUTER)]
        new = self.scaler.plan_beside(config)
        try:
            await self.scaler.grow(new, self.report)
            for spec in routers:
                self._renewed.append(spec)
                await self._renew_router(replace(spec, config=config))
        except EngineFault as error:
            self.report(f"going back: {error}")
            await self._undo(new)
            raise EngineFault(f"rolled back, the old configuration serves: {error}") from error
        self.scaler.adopt(config)
        self.keep(config)
        self.report("every router uses the new workers alone")
        await self.scaler.shrink(old, self.grace_s, self.report)

    async def _undo(self, new: Sequence[ProcessSpec]) -> None:
        steps = [partial(self._renew_router, spec) for spec in reversed(self._renewed)]
        going = {spec.name for spec in new}
        await undo_all([*steps, partial(self.scaler.shrink, going, self.grace_s, self.report)], self.report)

    async def _renew_router(self, spec: ProcessSpec) -> None:
        """Let what the old one has accepted end first: no other router of its model may be left to go on with it."""
        for process in self.workforce.workers(ProcessRole.ROUTER):
            if process.spec.name == spec.name:
                self.report(f"{spec.name} ends what it has")
                await self.workforce.drain_router(process, grace_s=self.grace_s)
        await renew_router(self.workforce, spec, self.report)


async def undo_all(steps: Sequence[Callable[[], Awaitable[None]]], report: Report) -> None:
    """Take every step, those behind one that fails too. Raises EngineFault in the end, the first one's."""
    failures: list[EngineFault] = []
    for step in steps:
        try:
            await step()
        except EngineFault as error:
            report(f"going back did not work: {error}")
            failures.append(error)
    if failures:
        raise EngineFault(f"going back worked in part only: {failures[0]}")


async def renew_router(workforce: Workforce, spec: ProcessSpec, report: Report) -> None:
    """Let a new router take the place of the one of that name, and its port. Raises EngineFault."""
    report(f"{spec.name} goes, and comes again")
    for process in workforce.workers(ProcessRole.ROUTER):
        if process.spec.name == spec.name:
            await workforce.remove_worker(process)
    try:
        await workforce.add_worker(spec)
    except StartFailed as error:
        raise EngineFault(f"{spec.name} did not start: {error}") from error
