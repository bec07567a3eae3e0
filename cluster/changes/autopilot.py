"""Keeps the pools as large as their load needs: asks the routers, plans, and carries out or only reports the plan.

Every `planner.interval_s` all routers report their load and the condition of their workers; the planner
(`cluster.planner`) answers with sizes and a reason. In mode `act` the scaler carries them out, one change at a time,
while planning continues; in mode `advise` they are only recorded. A change that fails, because a host is missing or a
worker does not start, is reported, and pools do not grow again before a pause that doubles with each failure.

A round that fails has no further effect: the cluster keeps its sizes.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.changes.observing import Ask, make_observation
from cluster.changes.scaling import Scaler
from cluster.planner.plan import Planner, PoolSizes, ScalingPlan
from cluster.processes.plan import ProcessRole
from cluster.processes.workforce import Workforce
from common.clock import Clock
from common.errors import KvrelayError, Overloaded
from kvrelay.v1 import controller_pb2

logger = logging.getLogger(__name__)

_NUM_KEPT = 100
_LONGEST_PAUSE_S = 600.0
_BEGUN = "under way"


@dataclass(slots=True, kw_only=True)
class PlanNote:
    """A plan and its outcome."""

    made_s: float
    present: PoolSizes
    plan: ScalingPlan
    outcome: str = ""

    @property
    def wants_change(self) -> bool:
        """Whether the plan changes the sizes."""
        return self.plan.sizes != self.present


class PlanGauges:
    """Prometheus metrics of the planner; see docs/metrics.md. Scrapes read them from another thread."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self._present = Gauge("kvrelay_pool_workers_present", "Workers that serve or start", ["pool"], registry=own)
        self._wanted = Gauge("kvrelay_pool_workers_wanted", "Workers that the planner wants", ["pool"], registry=own)
        self._changes = Counter("kvrelay_planner_changes", "Changes carried out, or failed", ["outcome"], registry=own)

    def set_sizes(self, *, present: PoolSizes, wanted: PoolSizes) -> None:
        """Publish the latest sizes."""
        for gauge, sizes in ((self._present, present), (self._wanted, wanted)):
            gauge.labels("prefill").set(sizes.prefill)
            gauge.labels("decode").set(sizes.decode)

    def count_change(self, outcome: str) -> None:
        """Count a change that was carried out, or failed."""
        self._changes.labels(outcome).inc()


class Autopilot:
    """Runs the planner of one cluster. Event loop only."""

    def __init__(
        self, scaler: Scaler, workforce: Workforce, *, planner: Planner, ask: Ask, clock: Clock, gauges: PlanGauges
    ) -> None:
        self.gauges = gauges
        self._scaler = scaler
        self._workforce = workforce
        self._planner = planner
        self._ask = ask
        self._clock = clock
        self._settings = scaler.config.planner
        self.latest: PlanNote | None = None
        """The last plan."""
        self._changes: deque[PlanNote] = deque(maxlen=_NUM_KEPT)
        """Plans that wanted other sizes than the plan before."""
        self._changing: asyncio.Task[None] | None = None
        self._num_failures = 0
        self._paused_until_s = 0.0

    @property
    def is_off(self) -> bool:
        """Whether nothing is planned (`planner.mode: off`)."""
        return self._settings.mode == "off"

    @asynccontextmanager
    async def running(self, stopping: asyncio.Event) -> AsyncIterator[None]:
        """Plan while the block runs; no change begins after `stopping` is set."""
        if self.is_off:
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
                async with asyncio.timeout(self._settings.interval_s):
                    await stopping.wait()
            except TimeoutError:
                try:
                    await self.step()
                except Exception:  # the top of a task: the next round may succeed
                    logger.exception("planning failed")

    async def step(self) -> None:
        """Ask, plan, and begin the change that follows, which continues after this returns."""
        reports = await self._ask(self._settings.window_s)
        if reports is None:
            return
        now_s = self._clock.monotonic()
        observed = make_observation(reports, self._workforce, self._scaler, now_s=now_s)
        note = PlanNote(made_s=now_s, present=observed.sizes, plan=self._planner.plan(observed))
        if note.wants_change:
            note.outcome = self._begin(note)
            is_new = not self._changes or self._changes[-1].plan.sizes != note.plan.sizes
            if is_new or note.outcome == _BEGUN:
                self._changes.append(note)
                logger.info("plan: %s", note.plan.reason, extra={"outcome": note.outcome})
        self.latest = note
        self.gauges.set_sizes(present=note.present, wanted=note.plan.sizes)

    async def settled(self) -> None:
        """Wait until no change is under way."""
        if self._changing is not None:
            await asyncio.wait((self._changing,))

    def response(self) -> controller_pb2.GetPlanResponse:
        """Return the latest plan, and the latest changes, newest first."""
        return controller_pb2.GetPlanResponse(
            mode=self._settings.mode,
            interval_s=self._settings.interval_s,
            latest=None if self.latest is None else self._record(self.latest),
            changes=[self._record(note) for note in reversed(self._changes)],
        )

    def _record(self, note: PlanNote) -> controller_pb2.PlanRecord:
        wanted, present = note.plan.sizes, note.present
        return controller_pb2.PlanRecord(
            age_s=self._clock.monotonic() - note.made_s,
            prefill=controller_pb2.PoolPlan(present=present.prefill, wanted=wanted.prefill),
            decode=controller_pb2.PoolPlan(present=present.decode, wanted=wanted.decode),
            reason=note.plan.reason,
            terms=[controller_pb2.PlanTerm(name=name, value=value) for name, value in note.plan.terms],
            outcome=note.outcome,
        )

    def _begin(self, note: PlanNote) -> str:
        """Begin to carry a plan out, if possible; returns the outcome so far."""
        if self._settings.mode != "act":
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
            pause_s = min(self._settings.interval_s * 2.0**self._num_failures, _LONGEST_PAUSE_S)
            self._num_failures += 1
            self._paused_until_s = self._clock.monotonic() + pause_s
            note.outcome = f"failed, pause of {pause_s:.0f} s: {error}"
            self.gauges.count_change("failed")
            logger.error("cannot carry out the plan: %s", error)
        else:
            self._num_failures = 0
            note.outcome = f"done in {self._clock.monotonic() - started_s:.1f} s"
            self.gauges.count_change("done")


def _log(text: str) -> None:
    logger.info("autopilot: %s", text)
