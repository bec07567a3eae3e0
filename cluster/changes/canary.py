"""Watches canaries, the first workers of a new configuration, and judges each by the old workers of its pool.

In this order:

1. It died more often than any other worker: bad.
2. It has run no step: good, and the reason says that it had no load.
3. Its pace is worse than the median of the others by more than a factor and a margin: bad. The pace is predicted by the
   timing model that each worker fits to its own steps, for the work of the pool: a prompt of 512 tokens for prefill,
   the gap between tokens for decode, at the load that the canary had. Measured means would depend on the batches.
4. Otherwise: good.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import ProcessRole
from cluster.processes.worker_calls import WorkerSnapshot

MARGIN_S = 0.002
"""Difference that no user notices and that timers and schedulers cause in short steps."""
_PROMPT_TOKENS = 512
_INSPECT_PERIOD_S = 0.5

Inspect = Callable[[str], Awaitable[WorkerSnapshot | None]]
"""Returns the status of the worker at host:port; None: no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """The load of one decode step."""

    num_decodes: int = 1
    num_context_tokens: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryObservation:
    """One worker's record while the canary served."""

    name: str
    num_deaths: int
    snapshot: WorkerSnapshot | None
    """Status of the worker at the end; None: it did not answer."""

    def pace_s(self, role: ProcessRole, load: DecodeLoad) -> float | None:
        """Return the seconds that the work of its pool takes, or None if it has not measured that."""
        if self.snapshot is None:
            return None
        timing = self.snapshot.timing
        if role is ProcessRole.PREFILL:
            return timing.prefill_s(_PROMPT_TOKENS, 0) if timing.prefill.is_measured else None
        return timing.itl_s(load.num_decodes, load.num_context_tokens) if timing.decode.is_measured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryVerdict:
    """Whether the other workers may follow a canary."""

    is_good: bool
    reason: str
    """Sentence for operators that starts with the worker's name."""


def judge(
    role: ProcessRole,
    canary: CanaryObservation,
    others: Sequence[CanaryObservation],
    *,
    load: DecodeLoad,
    max_slowdown: float,
) -> CanaryVerdict:
    """Return whether the other workers of a pool should follow the canary."""
    name = canary.name
    if canary.num_deaths > max((each.num_deaths for each in others), default=0):
        return CanaryVerdict(is_good=False, reason=f"{name} died {canary.num_deaths} times")
    if canary.snapshot is None or canary.snapshot.busy_s <= 0:
        return CanaryVerdict(is_good=True, reason=f"{name} runs, but no request came its way: no load to judge it by")
    pace_s = canary.pace_s(role, load)
    if pace_s is None:
        return CanaryVerdict(is_good=True, reason=f"{name} served, but too little to judge its pace")
    what = f"{_PROMPT_TOKENS} prompt tokens take" if role is ProcessRole.PREFILL else "a gap between tokens is"
    text = f"{name} served: {what} {pace_s * 1000:.1f} ms"
    known = [pace for each in others if (pace := each.pace_s(role, load)) is not None]
    if not known:
        return CanaryVerdict(is_good=True, reason=f"{text}; no other worker has measured its pace")
    usual_s = median(known)
    text += f", the others {usual_s * 1000:.1f} ms"
    if pace_s > max_slowdown * usual_s + MARGIN_S:
        return CanaryVerdict(is_good=False, reason=f"{text}; allowed is {max_slowdown:g} times as much")
    return CanaryVerdict(is_good=True, reason=text)


class CanaryWatch:
    """One canary and the other workers of its pool while they serve."""

    def __init__(
        self, *, role: ProcessRole, canary: ManagedProcess, others: Sequence[ManagedProcess], inspect: Inspect
    ) -> None:
        self._role = role
        self._canary = canary
        self._others = others
        self._inspect = inspect
        self._num_deaths_before = {process.spec.name: _num_deaths(process) for process in (canary, *others)}
        self._loads: list[DecodeLoad] = []

    def has_died(self) -> bool:
        """Return whether the canary has died more often than any other worker since the watch began."""
        return self._num_deaths(self._canary) > max(map(self._num_deaths, self._others), default=0)

    async def observe(self) -> None:
        """Note the present decode load of the canary."""
        snapshot = await self._ask(self._canary)
        if snapshot is not None and snapshot.num_decodes:
            self._loads.append(
                DecodeLoad(num_decodes=snapshot.num_decodes, num_context_tokens=snapshot.num_context_tokens)
            )

    async def verdict(self, max_slowdown: float) -> CanaryVerdict:
        """Judge the canary at its mean load."""
        canary = await self._observe(self._canary)
        others = await asyncio.gather(*map(self._observe, self._others))
        load = DecodeLoad()
        if self._loads:
            load = DecodeLoad(
                num_decodes=round(fmean(load.num_decodes for load in self._loads)),
                num_context_tokens=round(fmean(load.num_context_tokens for load in self._loads)),
            )
        return judge(self._role, canary, others, load=load, max_slowdown=max_slowdown)

    async def _observe(self, process: ManagedProcess) -> CanaryObservation:
        snapshot = await self._ask(process)
        return CanaryObservation(name=process.spec.name, num_deaths=self._num_deaths(process), snapshot=snapshot)

    async def _ask(self, process: ManagedProcess) -> WorkerSnapshot | None:
        return None if process.address is None else await self._inspect(process.address)

    def _num_deaths(self, process: ManagedProcess) -> int:
        return _num_deaths(process) - self._num_deaths_before[process.spec.name]


async def observe(watches: Sequence[CanaryWatch], seconds: float, *, sleep: Callable[[float], Awaitable[None]]) -> None:
    """Observe for that time, or until a canary has died."""
    left_s = seconds
    while left_s > 0 and not any(watch.has_died() for watch in watches):
        await sleep(min(_INSPECT_PERIOD_S, left_s))
        left_s -= _INSPECT_PERIOD_S
        await asyncio.gather(*(watch.observe() for watch in watches))


def _num_deaths(process: ManagedProcess) -> int:
    return process.life.num_lives - (process.address is not None)
