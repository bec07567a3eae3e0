"""Watches canaries while they serve, and asks at the end how they did beside the others of their pools."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean

from cluster.changes.canary import Conduct, DecodeLoad, Verdict, judge
from cluster.processes.inspection import Look
from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import ProcessRole

_LOOK_PERIOD_S = 0.5

Inspect = Callable[[str], Awaitable[Look | None]]
"""Asks the worker at host:port; None: no answer."""


class CanaryWatch:
    """One canary and the others of its pool while they serve."""

    def __init__(
        self,
        *,
        role: ProcessRole,
        canary: ManagedProcess,
        others: Sequence[ManagedProcess],
        look: Inspect,
    ) -> None:
        self._role = role
        self._canary = canary
        self._others = others
        self._look = look
        self._ended = {process.spec.name: _num_ended(process) for process in (canary, *others)}
        self._loads: list[DecodeLoad] = []

    def has_died(self) -> bool:
        """Return whether the canary has died since the watch began, more often than any of the others."""
        return self._num_deaths(self._canary) > max(map(self._num_deaths, self._others), default=0)

    async def observe(self) -> None:
        """See what the canary decodes just now."""
        look = await self._ask(self._canary)
        if look is not None and look.num_decodes:
            self._loads.append(DecodeLoad(num_decodes=look.num_decodes, num_context_tokens=look.num_context_tokens))

    async def verdict(self, max_slowdown: float) -> Verdict:
        """Judge by what was seen."""
        canary = await self._conduct(self._canary)
        others = await asyncio.gather(*map(self._conduct, self._others))
        return judge(self._role, canary, others, load=self._mean_load(), max_slowdown=max_slowdown)

    def _mean_load(self) -> DecodeLoad:
        if not self._loads:
            return DecodeLoad()
        return DecodeLoad(
            num_decodes=round(fmean(load.num_decodes for load in self._loads)),
            num_context_tokens=round(fmean(load.num_context_tokens for load in self._loads)),
        )

    async def _conduct(self, process: ManagedProcess) -> Conduct:
        look = await self._ask(process)
        return Conduct(
            name=process.spec.name,
            num_deaths=self._num_deaths(process),
            busy_s=0.0 if look is None else look.busy_s,
            timing=None if look is None else look.timing,
        )

    async def _ask(self, process: ManagedProcess) -> Look | None:
        return None if process.address is None else await self._look(process.address)

    def _num_deaths(self, process: ManagedProcess) -> int:
        return _num_ended(process) - self._ended[process.spec.name]


async def observe(watches: Sequence[CanaryWatch], seconds: float, *, sleep: Callable[[float], Awaitable[None]]) -> None:
    """Observe for so long, or until a canary has died."""
    left_s = seconds
    while left_s > 0 and not any(watch.has_died() for watch in watches):
        await sleep(min(_LOOK_PERIOD_S, left_s))
        left_s -= _LOOK_PERIOD_S
        await asyncio.gather(*(watch.observe() for watch in watches))


def _num_ended(process: ManagedProcess) -> int:
    """Return how many of its lives are over."""
    return process.num_lives - (process.address is not None)
