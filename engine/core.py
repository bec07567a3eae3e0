"""One engine: requests in, events out, one step after another. No threads, no clock of its own, no network.

A step is *planned* (sequences and pages), *launched*, and its results are *taken*: tokens become events, and finished
sequences leave. With `Executor.max_steps_in_flight` 1, steps run one after the other. With 2 the executor never waits
for the host: step n + 1 is planned and launched while step n computes.

    host      plan n+1 · launch n+1 · wait for n · take n · commands │ plan n+2 · launch n+2 · wait for n+1 · …
    executor  ───────── step n ──────────────────┤├────────────────── step n+1 ───────────────────────────┤├─ …

So plans are made before the tokens of one step are known; these are *pending*. Consequences:

1. A sequence runs on its pending token, by its place (`Sequence.pending_row`), unless the host needs the value; then
   it skips the step. With a grammar it runs, and its next token is chosen once the pending one is known
   (`StepHandle.choose`), while the step computes. Tokens that the grammar then forces make that choice void.
2. A sequence may have ended (end token, stop string, cancelled) while a step with it is in flight. That step's result
   for it is dropped (`OutputProcessor`), and its pages stay held until then (`Scheduler.finish`).
3. Pages are published in the prefix cache once their step is taken and their tokens are known (`Pages.publish`).
4. Nothing is preempted while a step is in flight: when pages run out, all steps are taken before the next plan
   (`StepPlan.is_short`).
5. When a step fails, all later steps in flight fail with it (`FailedSteps`). A sequence whose logits are not finite
   fails alone, with the others of its request.
"""

from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from common.block_hash import NO_HASHES, BlockHashes
from common.clock import Clock
from common.errors import Refused
from common.ids import BlockHash, HashRoot, RequestId
from common.kv_events import KvEvents
from common.prefix_chains import PrefixChain
from common.return_curve import ReturnCurve
from common.timing import TimingModel
from engine.events import EngineLoad, StepReport
from engine.executor import Executor
from engine.kv_store import has_windows
from engine.pages.block_pool import BlockPool
from engine.pages.cache_pins import CachePins
from engine.pages.hot_prefixes import hot_prefixes
from engine.pages.window_pages import WindowPages
from engine.published import ForgottenPages
from engine.request import EngineRequest
from engine.sequence import Sequence, SequenceState
from engine.steps.beam_groups import BeamGroups
from engine.steps.failed_steps import FailedSteps
from engine.steps.fit import check_fits, check_windows_fit
from engine.steps.group import Emitted, Group, Groups, Sink
from engine.steps.landing import Landing, Landings
from engine.steps.load import measure_load
from engine.steps.output_processor import OutputProcessor
from engine.steps.pipeline import Pipeline, StepTimer
from engine.steps.plan import StepPlan
from engine.steps.planner import StepPlanner
from engine.steps.scheduler import Scheduler, SchedulerLimits
from engine.steps.speculator import Speculator

_MAX_ACCEPTED = 4096  # a bound for drivers that never call `report`


class EngineCore:
    """Bookkeeping around an executor. Engine thread only; every method returns between two steps."""

    def __init__(
        self, executor: Executor, limits: SchedulerLimits, clock: Clock, speculator: Speculator | None = None
    ) -> None:
        """Without a `speculator`, or with an executor that verifies no drafts, answers come token by token."""
        if not executor.verifies_drafts:
            speculator = None
        self.executor = executor
        kv = executor.kv
        assert not has_windows(kv) or executor.max_steps_in_flight == 1, "a page would be given away that a step reads"
        windows = WindowPages(kv, limits.max_step_tokens) if has_windows(kv) else None
        self.pool = BlockPool(kv.num_blocks, windows, CachePins(kv.num_blocks, clock), clock)
        self.scheduler = Scheduler(self.pool, limits, speculator)
        self.landings = Landings(self.scheduler, self.scheduler.pages)
        self._pipeline = Pipeline(executor)
        self._clock = clock
        self._timer = StepTimer(clock)
        self._accepted: deque[RequestId] = deque(maxlen=_MAX_ACCEPTED)
        self.groups = Groups(self.scheduler)
        ends = executor.eos_token_ids
        self._beams = BeamGroups(self.scheduler, self.groups, clock, eos_token_ids=ends)
        self._outputs = OutputProcessor(self.scheduler, self.groups, self._beams, clock, eos_token_ids=ends)
        self.planner = StepPlanner(self.scheduler)
        """Chooses the sequences of each step; a simulator puts its own in place."""
        self._next_order = 0
        self._is_stalled = False
        self._failed_steps = FailedSteps(self.groups)

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something: a step is in flight, or the next plan may not be empty."""
        return self._pipeline.num_steps > 0 or (self.scheduler.has_work and not self._is_stalled)

    @property
    def num_steps_in_flight(self) -> int:
        """Steps launched whose results have not been taken."""
        return self._pipeline.num_steps

    def wake(self) -> None:
        """Try to plan again after a command: waiting sequences may fit now."""
        self._is_stalled = False

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, hashes: BlockHashes) -> Landing:
        """Return a place in line for a request that first pulls the blocks of these hashes; it enters with `add`."""
        self._next_order += 1
        return Landing(order=self._next_order - 1, queued_s=self._clock.monotonic(), hashes=hashes)

    def add(self, request: EngineRequest, sink: Sink, landing: Landing | None = None) -> Group | Refused:
        """Put a request in line: prefill here, then decode, or embed it if it has `pooling`. Raises as `reserve`."""
        landing = landing or self.arrive(NO_HASHES)
        return self._enter(Group(request, sink, landing.queued_s), self.scheduler.add, landing)

    def add_prefill_only(self, request: EngineRequest, sink: Sink, landing: Landing | None = None) -> Group | Refused:
        """Put a request in line for prompt and first tokens; its pages stay until `cancel`. Raises as `reserve`."""
        landing = landing or self.arrive(NO_HASHES)
        group = Group(request, sink, landing.queued_s, holds_after_prefill=True)
        return self._enter(group, self.scheduler.add, landing)

    def reserve(self, request: EngineRequest, sink: Sink) -> Group | Refused:
        """Grant pages for a request whose KV will be pulled. Raises PromptTooLong, or InvalidRequest."""
        landing = self.arrive(NO_HASHES)
        return self._enter(Group(request, sink, landing.queued_s), self.scheduler.reserve, landing)

    def commit(self, group: Group, num_tokens: int) -> None:
        """Mark the KV of a reservation's first `num_tokens` tokens as verified and in its pages."""
        if group.leader.state is SequenceState.RESERVED:
            # The last token of a prompt with beams is computed again, for the candidates of the next one.
            most = group.leader.num_tokens - (group.beams is not None)
            self.scheduler.commit(group.leader, min(num_tokens, most))

    def start(self, group: Group, first_tokens: Seq[tuple[int, bool]]) -> None:
        """Decode a filled reservation. `first_tokens`: (token id, finished) of each sample, in sample order; of beams
        there are none.
        """
        leader = group.leader
        if leader.state is not SequenceState.RESERVED:
            return  # cancelled in the meantime
        num_first = 0 if group.beams else leader.num_samples
        assert len(first_tokens) == num_first, f"{len(first_tokens)} first tokens instead of {num_first}"
        if group.beams and group.request.beams:
            group.prefilled_elsewhere(self._clock.monotonic())
            self._beams.resume(group)
            return
        self.scheduler.start(leader)
        if group.beams:
            return
        samples = self.groups.samples(leader, len(first_tokens))
        for sequence, (token_id, finished) in zip(samples, first_tokens, strict=True):
            sequence.append_token(token_id)
            if finished:
                self.groups.finish(sequence)

    def finish_sample(self, group: Group, sample_index: int) -> None:
        """End one sample whose text reached a stop string."""
        for sequence in group.sequences:
            if sequence.sample_index == sample_index:
                self.groups.finish(sequence)

    def cancel(self, group: Group) -> None:
        """Free everything that a request holds, in any state. Harmless when it is over."""
        self.groups.cancel(group)

    # ── stepping ────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> Emitted:
        """Plan and launch a step, then take the results that are due."""
        plan, emitted = self.begin_step()
        return emitted + self.finish_step(plan)

    def begin_step(self) -> tuple[StepPlan, Emitted]:
        """Plan the next step. Returns it, and events of the requests it starts, which may go out before it computes."""
        self._timer.begin()
        plan = self.planner.plan(now_s=self._clock.monotonic())
        self._is_stalled = not plan.batch and self._pipeline.num_steps == 0
        emitted: Emitted = []
        for sequence in plan.admitted:
            group = self.groups[sequence]
            started = group.admitted(sequence, self._clock.monotonic())
            if started is not None:
                emitted.append((group, started))
        return plan, emitted

    def finish_step(self, plan: StepPlan) -> Emitted:
        """Launch what `begin_step` planned, then take steps until no more than `max_steps_in_flight` - 1 are in flight.

        A fault of the executor ends the requests of the steps concerned, not the engine. Raises DeviceBroken when the
        executor does, and when step after step fails.
        """
        emitted: Emitted = []
        if plan.batch:
            try:
                self._pipeline.launch(plan)
            except Exception as error:  # noqa: BLE001 - the top of a step: every exception belongs to this batch
                self.scheduler.drop(plan)
                self._timer.pause()
                emitted += self._failed_steps.end([plan], error)
                plan = StepPlan()
            else:
                self.scheduler.launched(plan)
        must_know_all = not plan.batch or plan.is_short
        num_kept = 0 if must_know_all else self.executor.max_steps_in_flight - 1
        while self._pipeline.num_steps > num_kept:
            self._take_oldest(emitted)
        if not self.has_work:
            self._timer.pause()
        return emitted

    def hot_prefixes(self, max_blocks: int) -> list[PrefixChain]:
        """Return the most valuable `max_blocks` blocks of the cache."""
        if self.pool.windows is not None:
            return []  # a copy would be a prefix without the window before its end
        tables = (sequence.block_table or sequence.landed_blocks for sequence in self.groups)
        return hot_prefixes(self.pool, self.pool.last_reused(tables), max_blocks)

    def snapshot(self) -> KvEvents:
        """Return all blocks of the prefix cache."""
        return self.pool.snapshot()

    def report_published(self) -> "array[int] | None":
        """Report published blocks from now on; returns the lives of the pages. None: blocks have window pages, too."""
        if self.pool.windows is not None:
            return None
        self.scheduler.pages.published = []
        return self.pool.lives

    def forget(self, root: HashRoot) -> ForgottenPages:
        """Drop the cached blocks of a root that nobody holds."""
        forgotten = self.pool.forget(root)
        has_requests = any(group.request.hash_root == root for group in self.groups.values())
        return replace(forgotten, is_in_use=forgotten.is_in_use or has_requests)

    def expect_return(self, ends: Seq[BlockHash], curve: ReturnCurve) -> None:
        """Keep the cached blocks of a turn as long as a curve says."""
        self.pool.expect_return(ends, curve)

    def change_limits(self, limits: SchedulerLimits) -> None:
        """Take the limits of another pool."""
        self.scheduler.change_limits(limits)

    def take_timing(self, timing: TimingModel) -> None:
        """Share steps between prompts and answers by these predictions from now on."""
        self.scheduler.budget.take_timing(timing)

    def load(self) -> EngineLoad:
        """Return the load at this moment."""
        return measure_load(self.scheduler, now_s=self._clock.monotonic())

    @property
    def idle_s(self) -> float | None:
        """Time after which the load of an idle engine may be another one; None: it stays."""
        return None if self.pool.pins is None else self.pool.pins.wait_s

    def report(self) -> StepReport:
        """Return the load and the changes since the last report."""
        accepted = tuple(self._accepted)
        self._accepted.clear()
        pages = self.scheduler.pages
        published = tuple(pages.published or ())
        if published:
            pages.published = []
        return StepReport(
            kv_events=self.pool.drain_events(),
            load=self.load(),
            samples=self._timer.drain(),
            accepted=accepted,
            published=published,
        )

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, group: Group, enter: Callable[[Sequence], Refused | None], landing: Landing) -> Group | Refused:
        check_fits(group, self.scheduler, max_model_len=self.executor.max_model_len)
        leader = Sequence.from_request(group.request, block_size=self.scheduler.limits.block_size, order=landing.order)
        leader.max_num_tokens = min(leader.max_num_tokens, self.executor.max_model_len)
        leader.is_pinned = group.holds_after_prefill
        self._beams.begin(group, leader)
        check_windows_fit(leader, self.scheduler)
        self.landings.enter(landing, leader)
        refused = enter(leader)
        if refused is not None:
            self.scheduler.pages.release(leader)
            return refused
        group.sequences.append(leader)
        self.groups[leader] = group
        self._accepted.append(group.request.request_id)
        if leader.state is SequenceState.WAITING:
            self._beams.resume(group)
        return group

    def _take_oldest(self, emitted: Emitted) -> None:
        """Wait for the oldest step in flight and turn its results into events and follow-up state."""
        plan = self._pipeline.oldest
        try:
            results = self._pipeline.take()
        except Exception as error:  # noqa: BLE001 - as above
            self._abandon([plan], error, emitted)
            return
        emitted += self._failed_steps.end_not_finite(plan, results)
        seconds = self._timer.end(plan, results)
        if self.scheduler.speculator is not None and seconds is not None:
            self.scheduler.speculator.observe(plan, results, seconds)
        self.scheduler.complete(plan, results)
        emitted += self._outputs.process(plan, results)
        try:
            self._pipeline.choose()
        except Exception as error:  # noqa: BLE001 - as above
            self._abandon([], error, emitted)

    def _abandon(self, taken: Seq[StepPlan], error: Exception, emitted: Emitted) -> None:
        """End every request of taken steps that have failed, and of all in flight."""
        plans = [*taken, *self._pipeline.abandon()]
        self._timer.pause()
        emitted += self._failed_steps.end(plans, error)
        for failed in plans:
            self.scheduler.land(failed)
