"""Keeps the pools as large as their load needs: asks, plans, and carries out or only says so.

Every `planner.interval_s` all routers are asked what came and how their workers are; the planner (cluster/planner/)
answers with sizes and a reason. In mode `act` they are carried out by the scaler, one change at a time and beside
further plans; in mode `advise` they are written down alone. A change that fails, for want of a host or because a
worker does not start, is told, and pools are not grown again before a pause that doubles with each failure.

A round that goes wrong costs that round only: the cluster serves on with the sizes that it has.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from cluster.changes.observing import Ask, make_observation
from cluster.changes.scaling import Scaler, Workforce
from cluster.planner.observation import Observation, Pool, WorkerPhase
from cluster.planner.plan import Planner, PoolSizes, ScalingPlan
from cluster.processes.plan import ProcessRole
from common.clock import Clock
from common.errors import KvrelayError, Overloaded

logger = logging.getLogger(__name__)

NUM_KEPT = 100
_LONGEST_PAUSE_S = 600.0


@dataclass(slots=True, kw_only=True)
class PlanNote:
    """A plan, and what came of it."""

    made_s: float
    present: PoolSizes
    plan: ScalingPlan
    outcome: str = ""

    @property
    def wants_change(self) -> bool:
        """Whether the sizes are to be other ones."""
        return self.plan.sizes != self.present


class Gauges(Protocol):
    """Who publishes sizes."""

    def set_sizes(self, *, present: PoolSizes, wanted: PoolSizes) -> None:
        """Take the latest."""

    def count_change(self, outcome: str) -> None:
        """Count one that was carried out, or failed."""


class Autopilot:
    """One cluster's planner at work. Event loop only."""

    def __init__(
        self, scaler: Scaler, workforce: Workforce, *, planner: Planner, ask: Ask, clock: Clock, gauges: Gauges
    ) -> None:
        self._scaler = scaler
        self._workforce = workforce
        self._planner = planner
        self._ask = ask
        self._clock = clock
        self._gauges = gauges
        self._settings = scaler.config.planner
        self._notes: deque[PlanNote] = deque(maxlen=NUM_KEPT)
        self._changes: deque[PlanNote] = deque(maxlen=NUM_KEPT)
        self._changing: asyncio.Task[None] | None = None
        self._num_failures = 0
        self._paused_until_s = 0.0

    @property
    def mode(self) -> str:
        """off, advise or act."""
        return self._settings.mode

    @property
    def interval_s(self) -> float:
        """Seconds from plan to plan."""
        return self._settings.interval_s

    @property
    def latest(self) -> PlanNote | None:
        """The last plan."""
        return self._notes[-1] if self._notes else None

    @property
    def changes(self) -> tuple[PlanNote, ...]:
        """Plans that wanted other sizes than the plan before, newest first."""
        return tuple(reversed(self._changes))

    def age_s(self, note: PlanNote) -> float:
        """Return how long ago a plan was made."""
        return self._clock.monotonic() - note.made_s

    @asynccontextmanager
    async def running(self, stopping: asyncio.Event) -> AsyncIterator[None]:
        """Plan while the block runs, until `stopping` is set; nothing new is begun after that."""
        if self.mode == "off":
            yield
            return
        task = asyncio.create_task(self._run(stopping), name="autopilot")
        try:
            yield
        finally:
            for each in (task, self._changing):
                if each is not None:
                    each.cancel()
                    await asyncio.wait((each,))

    async def _run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                async with asyncio.timeout(self.interval_s):
                    await stopping.wait()
            except TimeoutError:
                try:
                    await self.step()
                except Exception:  # the top of a task: the next round may find things better
                    logger.exception("planning failed")

    async def step(self) -> None:
        """Ask, plan, and begin what follows; a change goes on after this returns."""
        reports = await self._ask(self._settings.window_s)
        if reports is None:
            return
        now_s = self._clock.monotonic()
        observed = make_observation(
            reports, self._workforce, self._scaler.times, config=self._scaler.config, now_s=now_s
        )
        note = PlanNote(made_s=now_s, present=_present(observed), plan=self._planner.plan(observed))
        if note.wants_change:
            note.outcome = self._begin(note)
            is_new = not self._changes or self._changes[-1].plan.sizes != note.plan.sizes
            if is_new or note.outcome == _BEGUN:
                self._changes.append(note)
                logger.info("plan: %s", note.plan.reason, extra={"outcome": note.outcome})
        self._notes.append(note)
        self._gauges.set_sizes(present=note.present, wanted=note.plan.sizes)

    async def settled(self) -> None:
        """Wait until no change is under way."""
        if self._changing is not None:
            await asyncio.wait((self._changing,))

    def _begin(self, note: PlanNote) -> str:
        """Begin to carry a plan out if that may be; returns the outcome so far."""
        if self.mode != "act":
            return "advised only (planner.mode: advise)"
        if self._changing is not None and not self._changing.done():
            return "waits: a change is under way"
        sizes, present = note.plan.sizes, note.present
        grows = sizes.prefill > present.prefill or sizes.decode > present.decode
        left_s = self._paused_until_s - self._clock.monotonic()
        if grows and left_s > 0:
            return f"waits {left_s:.0f} s: the last growth failed"
        self._changing = asyncio.create_task(self._carry_out(note), name="autopilot's change")
        return _BEGUN

    async def _carry_out(self, note: PlanNote) -> None:
        sizes = note.plan.sizes
        wanted = {ProcessRole.PREFILL: sizes.prefill, ProcessRole.DECODE: sizes.decode}
        started_s = self._clock.monotonic()
        try:
            await self._scaler.scale(wanted, grace_s=self._settings.grace_s, report=_log)
        except Overloaded as error:
            note.outcome = f"waits: {error}"
        except KvrelayError as error:
            pause_s = min(self.interval_s * 2.0**self._num_failures, _LONGEST_PAUSE_S)
            self._num_failures += 1
            self._paused_until_s = self._clock.monotonic() + pause_s
            note.outcome = f"failed, pause of {pause_s:.0f} s: {error}"
            self._gauges.count_change("failed")
            logger.error("the plan could not be carried out: %s", error)
        else:
            self._num_failures = 0
            note.outcome = f"done in {self._clock.monotonic() - started_s:.1f} s"
            self._gauges.count_change("done")


_BEGUN = "under way"


def _present(observed: Observation) -> PoolSizes:
    prefill, decode = (observed.count(pool, WorkerPhase.STARTING, WorkerPhase.SERVING) for pool in Pool)
    return PoolSizes(prefill=prefill, decode=decode)


def _log(text: str) -> None:
    logger.info("autopilot: %s", text)
