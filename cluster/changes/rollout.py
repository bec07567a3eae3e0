"""Brings a running cluster to another configuration, step by step, and back when a step goes wrong.

1. Find what differs and what each difference needs (`changes`); refuse what cannot be, by key. Nothing has changed yet.
2. In each pool that needs new workers one more is started, the *canary*. It serves beside the old ones for a while and
   is judged (`canary`). Not good, or not started: it drains, and the cluster is as it was.
3. Where routers have to be new, they are replaced, one after the other: clients go on at another one (refused with a
   single router, whose clients have nowhere to go). Then the old workers, one after the other. Canaries stay meanwhile,
   so that no pool is ever smaller than before. A process that does not start: those that were replaced get their old
   configuration again, the same way.
4. Canaries drain. The configuration is the cluster's: it is what processes read that start from now on.
5. Pools get their new sizes.

Where old and new workers could not exchange KV, another model for one, all processes are renewed at once and steps 2 to
5 are those of `changeover`.

A caller that goes away changes nothing: the rollout goes on to its end, or back. A supervisor that dies in the middle
takes its processes with it; the file in the run folder is then still the old one, since it is replaced at step 4.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cluster.changes.canary_watch import CanaryWatch, Inspect, observe
from cluster.changes.changeover import Changeover, renew_router, undo_all
from cluster.changes.diff import (
    Change,
    find_changes,
    is_new_generation,
    keep_free_ports,
    needs_routers,
    roles_to_renew,
)
from cluster.changes.scaling import POOLS, Report, Scaler, Workforce
from cluster.processes.plan import ProcessRole, ProcessSpec
from common.config import ServingConfig
from common.errors import EngineFault, InvalidRequest

logger = logging.getLogger(__name__)

_ONE_ROUTER = "Clients of the only router would lose it: start the cluster with router.count: 2 and name both to them"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTerms:
    """How to go about a rollout."""

    canary_s: float
    """How long canaries serve before they are judged; 0: they are not."""
    max_slowdown: float
    """Times the others' pace that a canary may take."""
    grace_s: float
    """How long a worker that goes may take to give its requests away."""
    is_forced: bool = False
    """Whether pools may become smaller than their load needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a rollout stands on besides the pools."""

    keep: Callable[[ServingConfig], None]
    """Write the configuration down where processes find it that start from now on."""
    check: Callable[[Mapping[ProcessRole, int]], Awaitable[None]]
    """Raise InvalidRequest for pool sizes that would not carry the present load."""
    look: Inspect
    """Ask the worker at an address."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Rollouts:
    """Runs rollouts, one after the other. Event loop only."""

    def __init__(self, scaler: Scaler, workforce: Workforce, surroundings: Surroundings) -> None:
        self._scaler = scaler
        self._workforce = workforce
        self._surroundings = surroundings

    async def preview(self, wanted: ServingConfig, *, report: Report) -> None:
        """Report what differs and what it needs. Raises InvalidRequest for what cannot be."""
        self._compare(wanted, report)

    async def run(self, wanted: ServingConfig, terms: RolloutTerms, *, report: Report) -> None:
        """Bring the cluster to `wanted`; `report` hears of each step.

        Raises InvalidRequest for what cannot be, Overloaded while another change runs, EngineFault when it went wrong
        and was undone.
        """
        async with self._scaler.changing():
            after, changes = self._compare(wanted, report)
            sizes = self._scaler.sizes()
            if not terms.is_forced:
                await self._surroundings.check(_sizes_of(after))
            if is_new_generation(changes):
                changeover = Changeover(
                    scaler=self._scaler,
                    workforce=self._workforce,
                    keep=self._surroundings.keep,
                    grace_s=terms.grace_s,
                    report=report,
                )
                await changeover.run(after)
                return
            roles = tuple(role for role in roles_to_renew(changes) if sizes[role])
            if roles or needs_routers(changes):
                renewal = _Renewal(
                    self._scaler, self._workforce, surroundings=self._surroundings, terms=terms, report=report
                )
                await renewal.run(after, roles, routers=self._routers() if needs_routers(changes) else ())
            self._scaler.adopt(after)
            self._surroundings.keep(after)
            if _sizes_of(after) != sizes:
                await self._scaler.resize(_sizes_of(after), terms.grace_s, report)

    def _compare(self, wanted: ServingConfig, report: Report) -> tuple[ServingConfig, Sequence[Change]]:
        """Return the configuration with definite ports, and what differs from how the cluster runs."""
        sizes = self._scaler.sizes()
        before = with_sizes(self._scaler.config, sizes)
        after = keep_free_ports(before, wanted)
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
            new = self._scaler.plan_beside(after)
            report(f"{len(new)} new workers beside the {sum(sizes.values())} that serve: room for both is needed")
            return after, changes
        if roles_to_renew(changes):
            self._scaler.plan(after, {role: size + 1 for role, size in sizes.items()})
        if _sizes_of(after) != sizes:
            self._scaler.plan(after, _sizes_of(after))
        return after, changes

    def _routers(self) -> Sequence[ProcessSpec]:
        return [process.spec for process in self._workforce.workers(ProcessRole.ROUTER)]


def with_sizes(config: ServingConfig, sizes: Mapping[ProcessRole, int]) -> ServingConfig:
    """Return a configuration with other pool sizes."""
    pools = config.pools
    changed = {str(role): getattr(pools, role).model_copy(update={"count": size}) for role, size in sizes.items()}
    return config.model_copy(update={"pools": pools.model_copy(update=changed)})


def _sizes_of(config: ServingConfig) -> dict[ProcessRole, int]:
    return {role: getattr(config.pools, role).count for role in POOLS}


@dataclass(slots=True)
class _Renewal:
    """New workers for some pools. One use."""

    scaler: Scaler
    workforce: Workforce
    surroundings: Surroundings = field(kw_only=True)
    terms: RolloutTerms = field(kw_only=True)
    report: Report = field(kw_only=True)
    _canaries: dict[ProcessRole, ProcessSpec] = field(default_factory=dict, init=False)
    _replaced: list[ProcessSpec] = field(default_factory=list, init=False)
    """The old workers that were taken away, in order."""
    _renewed: list[ProcessSpec] = field(default_factory=list, init=False)
    """The old routers that were."""

    async def run(
        self, config: ServingConfig, roles: Sequence[ProcessRole], *, routers: Sequence[ProcessSpec] = ()
    ) -> None:
        """Replace every worker of these pools, and the routers. Raises EngineFault, and then it is as it was."""
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
        except EngineFault as error:
            self.report(f"going back: {error}")
            await self._undo()
            raise EngineFault(f"rolled back, the old configuration serves: {error}") from error
        await self._drain_canaries()

    async def _replace(self, spec: ProcessSpec) -> None:
        """Let a new worker take an old one's place: its name, and the canary's everything else."""
        self._replaced.append(spec)
        await self.scaler.shrink({spec.name}, self.terms.grace_s, self.report)
        await self.scaler.grow([replace(self._canaries[spec.role], name=spec.name)], self.report)

    async def _undo(self) -> None:
        """Give what was replaced its old configuration again; canaries stand in until then."""
        workers = [partial(self._bring_back, spec) for spec in reversed(self._replaced)]
        routers = [partial(renew_router, self.workforce, spec, self.report) for spec in reversed(self._renewed)]
        await undo_all([*workers, *routers, self._drain_canaries], self.report)

    async def _bring_back(self, spec: ProcessSpec) -> None:
        await self.scaler.shrink({spec.name}, self.terms.grace_s, self.report)
        await self.scaler.grow([spec], self.report)

    async def _drain_canaries(self) -> None:
        await self.scaler.shrink({spec.name for spec in self._canaries.values()}, self.terms.grace_s, self.report)

    async def _judge(self) -> None:
        """Let the canaries serve and judge them. Raises EngineFault for a bad one."""
        names = ", ".join(spec.name for spec in self._canaries.values())
        self.report(f"{names} beside the old workers for {self.terms.canary_s:g} s")
        watches = [self._watch(role, spec) for role, spec in self._canaries.items()]
        await observe(watches, self.terms.canary_s, sleep=self.surroundings.sleep)
        for watch in watches:
            verdict = await watch.verdict(self.terms.max_slowdown)
            self.report(f"canary {'good' if verdict.is_good else 'bad'}: {verdict.reason}")
            if not verdict.is_good:
                raise EngineFault(f"the canary is bad: {verdict.reason}")

    def _watch(self, role: ProcessRole, spec: ProcessSpec) -> CanaryWatch:
        pool = self.workforce.workers(role)
        (canary,) = [process for process in pool if process.spec.name == spec.name]
        others = [process for process in pool if process is not canary]
        return CanaryWatch(role=role, canary=canary, others=others, look=self.surroundings.look)
