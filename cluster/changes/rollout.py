"""Brings a running cluster to another configuration step by step, and back if a step fails.

1. Compare the configurations (`processes.diff`) and refuse impossible changes by key. Nothing has changed yet.
2. Start one more worker, the *canary*, in each pool that needs new workers. It serves beside the old ones for a while
   and is judged (`canary`). If it is bad or does not start, it drains and the cluster is as before.
3. Replace the routers if needed, one at a time: clients continue at another router (refused with a single router). Then
   replace the old workers, one at a time. Canaries stay meanwhile, so that no pool is ever smaller than before. If a
   process does not start, those that were replaced get their old configuration again in the same way.
4. Drain the canaries. The configuration becomes the cluster's: processes that start from now on read it.
5. Bring the pools to their new sizes. A pool whose count in the file is still that of the last rollout was scaled since
   then, and stays as it is.

A rollout that is cancelled before step 4 goes back in the same way; later it keeps the new configuration.

Where old and new workers cannot exchange KV, for example with another model, all processes are replaced at once and
`changeover` takes the place of steps 2 to 5. A restart is steps 2 to 4 with the same configuration and no judgement.

A caller that disconnects changes nothing: the rollout continues to its end, or back. A supervisor that dies in the
middle takes its processes with it; the file in the run folder is still the old one, since step 4 replaces it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cluster.changes.canary import CanaryWatch, Inspect, observe
from cluster.changes.changeover import Changeover, go_back, renew_router, undo_all
from cluster.changes.scaling import Report, Scaler
from cluster.processes.diff import (
    KeyChange,
    find_changes,
    is_new_generation,
    keep_free_ports,
    needs_routers,
    roles_to_renew,
)
from cluster.processes.plan import ProcessRole, ProcessSpec, sizes_of, with_sizes
from cluster.processes.workforce import Workforce
from common.config import ServingConfig
from common.errors import EngineFault, InvalidRequest
from common.structured import completed

_ONE_ROUTER = (
    "Clients would lose the only router: start the cluster with router.count: 2 and give clients both addresses"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTerms:
    """The conditions of a rollout."""

    canary_s: float
    """Time that canaries serve before they are judged; 0: not judged."""
    max_slowdown: float
    """Factor by which a canary may be slower than the others."""
    grace_s: float
    """Time that a worker may take to move its requests away."""
    is_forced: bool = False
    """Whether pools may become too small for their load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutHooks:
    """Functions that a rollout needs besides the processes."""

    keep: Callable[[ServingConfig], None]
    """Writes the configuration that processes read from now on."""
    check: Callable[[Mapping[ProcessRole, int]], Awaitable[None]]
    """Raises InvalidRequest for pool sizes that would not carry the present load."""
    inspect: Inspect
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Runs rollouts. No other change runs meanwhile (`change.Changes`). Event loop only."""

    scaler: Scaler
    workforce: Workforce
    hooks: RolloutHooks

    async def preview(self, wanted: ServingConfig, *, report: Report) -> None:
        """Report each difference and what it needs. Raises InvalidRequest for an impossible one."""
        self._compare(wanted, report)

    async def run(self, wanted: ServingConfig, terms: RolloutTerms, *, report: Report) -> None:
        """Bring the cluster to `wanted`; `report` is called with each step.

        Raises InvalidRequest for an impossible change, EngineFault if a step failed and the rollout was undone.
        """
        after, changes = self._compare(wanted, report)
        own_counts = with_sizes(after, sizes_of(wanted))
        sizes = self.scaler.sizes()
        if not terms.is_forced:
            await self.hooks.check(sizes_of(after))
        if is_new_generation(changes):
            changeover = Changeover(
                scaler=self.scaler,
                workforce=self.workforce,
                keep=partial(self._keep, own_counts),
                grace_s=terms.grace_s,
                report=report,
            )
            await changeover.run(after)
            return
        roles = tuple(role for role in roles_to_renew(changes) if sizes[role])
        renewal = self._renewal(terms, report)
        if roles or needs_routers(changes):
            await renewal.run(after, roles, routers=self._routers() if needs_routers(changes) else ())
        self._keep(own_counts)
        report("the new configuration is the cluster's")
        await completed(renewal.drain_canaries())
        if sizes_of(after) != sizes:
            await self.scaler.resize(sizes_of(after), terms.grace_s, report)

    def _keep(self, config: ServingConfig) -> None:
        """Make a configuration the cluster's, with the counts of its file: the next rollout sees which were edited."""
        self.scaler.adopt(config)
        self.hooks.keep(config)

    def _wanted_sizes(self, wanted: ServingConfig, report: Report) -> dict[ProcessRole, int]:
        """Return the sizes of the file, or those of pools that were scaled while their counts there stayed."""
        sizes, last = sizes_of(wanted), sizes_of(self.scaler.config)
        for role, size in self.scaler.sizes().items():
            if sizes[role] == last[role] != size:
                report(
                    f"{role} stays at {size}: it was scaled, and the file still says {last[role]};"
                    f" `kvrelay scale {role}={last[role]}` takes that back"
                )
                sizes[role] = size
        return sizes

    async def restart(self, *, grace_s: float, report: Report) -> None:
        """Replace every worker by a new process with the same configuration, one at a time.

        One worker more than usual runs in each pool meanwhile. Raises EngineFault like `run`.
        """
        roles = [role for role, size in self.scaler.sizes().items() if size]
        renewal = self._renewal(RolloutTerms(canary_s=0.0, max_slowdown=1.0, grace_s=grace_s), report)
        await renewal.run(self.scaler.config, roles)
        await completed(renewal.drain_canaries())

    def _renewal(self, terms: RolloutTerms, report: Report) -> "_Renewal":
        return _Renewal(self.scaler, self.workforce, hooks=self.hooks, terms=terms, report=report)

    def _compare(self, wanted: ServingConfig, report: Report) -> tuple[ServingConfig, Sequence[KeyChange]]:
        """Return the configuration with definite ports, and its differences from the running one."""
        sizes = self.scaler.sizes()
        before = with_sizes(self.scaler.config, sizes)
        after = with_sizes(keep_free_ports(before, wanted), self._wanted_sizes(wanted, report))
        changes = find_changes(before, after)
        for change in changes:
            report(str(change))
        if not changes:
            report("nothing differs")
        refused = [change for change in changes if change.is_refused]
        if refused:
            raise InvalidRequest("; ".join(map(str, refused)), field=refused[0].key)
        if needs_routers(changes) and len(self._routers()) == 1:
            (first, *_) = [change for change in changes if needs_routers([change])]
            raise InvalidRequest(f"{first}. {_ONE_ROUTER}", field=first.key)
        if is_new_generation(changes):
            new = self.scaler.plan_beside(after)
            report(f"{len(new)} new workers beside the {sum(sizes.values())} that serve: room for both is needed")
            return after, changes
        if roles_to_renew(changes):
            self.scaler.plan(after, {role: size + 1 for role, size in sizes.items()})
        if sizes_of(after) != sizes:
            self.scaler.plan(after, sizes_of(after))
        return after, changes

    def _routers(self) -> Sequence[ProcessSpec]:
        return [process.spec for process in self.workforce.workers(ProcessRole.ROUTER)]


@dataclass(slots=True)
class _Renewal:
    """Replaces the workers of some pools, and the routers. Used once."""

    scaler: Scaler
    workforce: Workforce
    hooks: RolloutHooks = field(kw_only=True)
    terms: RolloutTerms = field(kw_only=True)
    report: Report = field(kw_only=True)
    _canaries: dict[ProcessRole, ProcessSpec] = field(default_factory=dict, init=False)
    _replaced: list[ProcessSpec] = field(default_factory=list, init=False)
    """Specs of the old workers that were removed, in order."""
    _renewed: list[ProcessSpec] = field(default_factory=list, init=False)
    """Specs of the old routers that were removed, in order."""

    async def run(
        self, config: ServingConfig, roles: Sequence[ProcessRole], *, routers: Sequence[ProcessSpec] = ()
    ) -> None:
        """Replace every worker of these pools, and these routers; canaries stay.

        Raises EngineFault, or CancelledError, after undoing everything.
        """
        sizes = self.scaler.sizes()
        more = sizes | {role: sizes[role] + 1 for role in roles}
        old = {role: [process.spec for process in self.workforce.workers(role)] for role in roles}
        present = {spec.name for specs in old.values() for spec in specs}
        for spec in self.scaler.plan(config, more) if roles else ():
            if spec.role in roles and spec.name not in present:
                self._canaries[spec.role] = spec
        try:
            await self.scaler.grow(list(self._canaries.values()), self.report)
            if self.terms.canary_s and self._canaries:
                await self._judge()
            for spec in routers:
                self._renewed.append(spec)
                await renew_router(self.workforce, replace(spec, config=config), self.report)
            for role in roles:
                for spec in old[role]:
                    await self._replace(spec)
        except (EngineFault, asyncio.CancelledError) as error:
            await go_back(error, self._undo, workforce=self.workforce, report=self.report)

    async def _replace(self, spec: ProcessSpec) -> None:
        """Replace an old worker by a new one with its name and the spec of the canary."""
        self._replaced.append(spec)
        await self.scaler.shrink({spec.name}, self.terms.grace_s, self.report)
        await self.scaler.grow([replace(self._canaries[spec.role], name=spec.name)], self.report)

    async def _undo(self) -> None:
        """Bring replaced processes back to their old configuration; canaries stand in until then."""
        workers = [partial(self._bring_back, spec) for spec in reversed(self._replaced)]
        routers = [partial(renew_router, self.workforce, spec, self.report) for spec in reversed(self._renewed)]
        await undo_all([*workers, *routers, self.drain_canaries], self.report)

    async def _bring_back(self, spec: ProcessSpec) -> None:
        if spec in [process.spec for process in self.workforce.workers(spec.role)]:
            return  # it had not left yet, or its successor is the same
        await self.scaler.shrink({spec.name}, self.terms.grace_s, self.report)
        await self.scaler.grow([spec], self.report)

    async def drain_canaries(self) -> None:
        """Drain and stop the canaries, which the new workers have replaced."""
        await self.scaler.shrink({spec.name for spec in self._canaries.values()}, self.terms.grace_s, self.report)

    async def _judge(self) -> None:
        """Let the canaries serve, then judge them. Raises EngineFault for a bad one."""
        names = ", ".join(spec.name for spec in self._canaries.values())
        self.report(f"{names} beside the old workers for {self.terms.canary_s:g} s")
        watches = [self._watch(role, spec) for role, spec in self._canaries.items()]
        await observe(watches, self.terms.canary_s, sleep=self.hooks.sleep)
        for watch in watches:
            verdict = await watch.verdict(self.terms.max_slowdown)
            self.report(f"canary {'good' if verdict.is_good else 'bad'}: {verdict.reason}")
            if not verdict.is_good:
                raise EngineFault(f"the canary is bad: {verdict.reason}")

    def _watch(self, role: ProcessRole, spec: ProcessSpec) -> CanaryWatch:
        pool = self.workforce.workers(role)
        (canary,) = [process for process in pool if process.spec.name == spec.name]
        others = [process for process in pool if process is not canary]
        return CanaryWatch(role=role, canary=canary, others=others, inspect=self.hooks.inspect)
