"""Keeps the pools as large as their load needs: asks the routers, plans, and carries out or only reports the plan.

Every `planner.interval_s` all routers report their load and the condition of their workers; the planner
(`cluster.planner`) answers with sizes and a reason. In mode `act` they are carried out as a change like any other, one
at a time and never behind another change, while planning continues; in mode `advise` they are only recorded. A change
that fails, because a host is missing or a worker does not start, or that is cancelled, is reported, and pools do not
grow again before a pause that doubles with each failure.

A round that fails has no further effect: the cluster keeps its sizes.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.changes.change import ChangeKind, Changes, ClusterChange
from cluster.changes.observing import Ask, make_observation
from cluster.changes.scaling import Report, Scaler, in_words
from cluster.planner.plan import Planner, PoolSizes, ScalingPlan
from cluster.processes.plan import POOLS
from cluster.processes.workforce import Workforce
from common.clock import Clock
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
        for outcome in ("done", "failed"):  # an alert on the first failure needs the zero before it
            self._changes.labels(outcome)

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
        self,
        scaler: Scaler,
        workforce: Workforce,
        changes: Changes,
        *,
        planner: Planner,
        ask: Ask,
        clock: Clock,
    ) -> None:
        self.gauges = PlanGauges()
        self._scaler = scaler
        self._changes = changes
        self._workforce = workforce
        self._planner = planner
        self._ask = ask
        self._clock = clock
        self._settings = scaler.config.planner
        self.latest: PlanNote | None = None
        """The last plan."""
        self._notes: deque[PlanNote] = deque(maxlen=_NUM_KEPT)
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
            is_new = not self._notes or self._notes[-1].plan.sizes != note.plan.sizes
            if is_new or note.outcome == _BEGUN:
                self._notes.append(note)
                logger.info("plan: %s", note.plan.reason, extra={"outcome": note.outcome})
        self.latest = note
        self.gauges.set_sizes(present=note.present, wanted=note.plan.sizes)

    async def settled(self) -> None:
        """Wait until no change is under way."""
        if self._changing is not None:
            await asyncio.wait((self._changing,))

    def response(self, *, num_changes: int = _NUM_KEPT) -> controller_pb2.GetPlanResponse:
        """Return the latest plan, and at most `num_changes` of the latest changes, newest first."""
        return controller_pb2.GetPlanResponse(
            mode=self._settings.mode,
            interval_s=self._settings.interval_s,
            latest=None if self.latest is None else self._record(self.latest),
            changes=[self._record(note) for note in islice(reversed(self._notes), num_changes)],
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
        sizes, present = note.plan.sizes, note.present
        wanted = {role: getattr(sizes, role) for role in POOLS if getattr(sizes, role) != getattr(present, role)}
        under_way = self._changes.touching(wanted)
        if under_way:
            return f"waits: {under_way[0]} is under way"
        if self._changing is not None and not self._changing.done():
            return "waits: the change before is under way"
        grows = sizes.prefill > present.prefill or sizes.decode > present.decode
        left_s = self._paused_until_s - self._clock.monotonic()
        if grows and left_s > 0:
            return f"waits {left_s:.0f} s: the last growth failed"

        async def work(report: Report) -> None:
            await self._scaler.scale(wanted, grace_s=self._settings.grace_s, report=report)

        change = self._changes.begin(ChangeKind.PLANNER, in_words(wanted), wanted, work)
        self._changing = asyncio.create_task(self._note_result(note, change), name="autopilot's change")
        return _BEGUN

    async def _note_result(self, note: PlanNote, change: ClusterChange) -> None:
        started_s = self._clock.monotonic()
        try:
            await change.result()
        except Exception as error:  # noqa: BLE001 - the top of a task: it becomes the outcome
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
