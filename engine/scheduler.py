"""Chooses the sequences and pages of the next step.

A step mixes decode tokens (first) and prefill chunks (with the rest of the token budget). A sequence goes

    WAITING ──admit──▶ RUNNING ──hold──▶ HELD          (prefill worker: pages stay for the puller)
       ▲                 │ ▲
       └────preempt──────┘ └──start── RESERVED          (decode worker: pages that a transfer fills)

and from any state to FINISHED. Its pages are then released: at once, or with the last step in flight that may still
write them. Preemption takes the pages of the latest arrival, which keeps its place in line and is computed again
later, from what the prefix cache still holds. Beams of one request are preempted together (`engine/beams.py`): none of
them could go on without the others.

A plan made while an earlier step is in flight, whose tokens are not known yet, never preempts: when pages run out,
sequences without one skip the step and the plan `is_short`. The next plan is then made with nothing in flight, and can
preempt.
"""

from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.errors import Refused
from engine.backlog import Backlog
from engine.block_pool import BlockPool
from engine.executor import Branch, ScheduledSequence, StepResult
from engine.pages import Pages
from engine.plan import StepPlan
from engine.sequence import Sequence, SequenceState
from engine.speculation.drafter import Draft
from engine.speculation.speculator import Speculator
from engine.step_budget import StepBudget
from engine.unplanned import UnplannedDecodes


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one engine."""

    block_size: int
    max_step_tokens: int
    max_running: int
    max_waiting: int
    watermark: float = 0.01
    """Share of the pages that admission leaves free for the growth of running sequences, so that it does not thrash."""


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order, sequence.sample_index


def _awaits_beam(sequence: Sequence) -> bool:
    """Whether a preempted beam has to wait for another one, whose blocks it may then find in the cache.

    Beams are computed again one after the other, so that they share their pages again.
    """
    running = (beam for beam in sequence.beams or () if beam.state is SequenceState.RUNNING)
    return any(beam.candidates is None for beam in running)


class Scheduler:
    """Owns the queues. Engine thread only."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, speculator: Speculator | None = None) -> None:
        """Without a `speculator`, steps verify no drafts."""
        self.pool = pool
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.held: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.backlog = Backlog(pool, limits.block_size)
        """Work of the waiting sequences."""
        self.pages = Pages(pool, limits.block_size)
        self.budget = StepBudget()
        self.speculator = speculator
        self._num_steps_in_flight = 0
        self._watermark_blocks = max(1, round(limits.watermark * pool.num_blocks))

    def change_limits(self, limits: SchedulerLimits) -> None:
        """Change the bounds from the next step on. Admitted sequences stay, even above the new limits."""
        assert limits.block_size == self.limits.block_size, "pages keep their size"
        self.limits = limits
        self._watermark_blocks = max(1, round(limits.watermark * self.pool.num_blocks))

    @property
    def has_work(self) -> bool:
        """Whether `schedule` could find something to do."""
        return bool(self.waiting or self.running)

    @property
    def num_free_slots(self) -> int:
        """Sequences that may still join those in the batch and in line; a lone prompt may have more samples."""
        return max(0, self.limits.max_running - self._num_slots)

    @property
    def _num_slots(self) -> int:
        return sum(s.num_samples for s in (*self.running, *self.reserved, *self.waiting))

    @property
    def num_spoken_for(self) -> int:
        """Free pages that are reserved for running sequences and the first in line."""
        if not self.waiting:
            return self._num_spared(0)
        first = self.waiting[0]
        return self._num_spared(0) + self.pages.num_blocks_for(first.num_tokens) - len(first.landed_blocks)

    # ── entering ────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, sequence: Sequence) -> Refused | None:
        """Put a sequence in line."""
        if len(self.waiting) >= self.limits.max_waiting:
            return Refused(reason=f"{len(self.waiting)} sequences are waiting already", retry_after_s=1.0)
        self._enqueue(sequence)
        return None

    def reserve(self, sequence: Sequence) -> Refused | None:
        """Grant pages for all known tokens, which a transfer fills, or refuse; see `Pages.take` for what it sets."""
        slots = self._num_slots
        if slots and slots + sequence.num_samples > self.limits.max_running:
            return Refused(reason=f"{slots} sequences are running or about to run", retry_after_s=0.5)
        if self.waiting:
            return Refused(reason="sequences are waiting for pages", retry_after_s=0.5)
        # Of beams, the last token is computed here: its candidates are needed.
        hashes = sequence.block_hashes[: sequence.num_reusable_blocks] if sequence.is_beam else sequence.block_hashes
        cached = self.pool.match_prefix(hashes)
        # Every sample writes its next token soon.
        if not self.pages.take(sequence, cached, num_spared=self._num_spared(sequence.num_samples)):
            return Refused(reason=f"{self.pool.num_free} pages are free; too few for this prompt", retry_after_s=0.5)
        sequence.state = SequenceState.RESERVED
        self.reserved.append(sequence)
        return None

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the KV of a reservation's first `num_tokens` tokens as ready: a transfer has verified it."""
        assert sequence.state is SequenceState.RESERVED, sequence.state
        assert sequence.num_computed <= num_tokens <= sequence.num_tokens, (sequence.num_computed, num_tokens)
        sequence.num_ready = sequence.num_computed = num_tokens
        self.pages.publish(sequence)

    def start(self, sequence: Sequence) -> None:
        """Let a completely filled reservation run; of beams, without the last token."""
        num_filled = sequence.num_tokens - sequence.is_beam
        assert sequence.num_computed == num_filled, f"{sequence.num_computed} of {num_filled} tokens"
        self.reserved.remove(sequence)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_order)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of the line, or its reservation back; what that has filled stays cached."""
        if sequence.state is SequenceState.RESERVED:
            self.reserved.remove(sequence)
            self.pages.release(sequence)
        else:
            self._dequeue(sequence)

    def line_up(self, sequences: Seq[Sequence]) -> None:
        """Put sequences without pages in line, each at its place."""
        for sequence in sequences:
            self._enqueue(sequence)

    def fork(self, parent: Sequence, sample_index: int) -> Sequence:
        """Return another sample that continues a running sequence; they share all pages until they write."""
        child = parent.fork(sample_index)
        self.pages.share(child)
        insort(self.running, child, key=_order)
        return child

    # ── leaving ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, sequence: Sequence) -> None:
        """Take a computed prompt out of the batch and keep its pages."""
        self.running.remove(sequence)
        sequence.state = SequenceState.HELD
        self.held.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Release everything that a sequence holds, in any state. Harmless when it is finished already.

        Pages that steps in flight may still write are released with the last of these steps: a transfer for the next
        owner might fill them before that.
        """
        match sequence.state:
            case SequenceState.WAITING:
                self._dequeue(sequence)
            case SequenceState.RUNNING:
                self.pages.publish(sequence)  # blocks that the last tokens of a draft have filled
                self.running.remove(sequence)
            case SequenceState.RESERVED:
                self.reserved.remove(sequence)
            case SequenceState.HELD:
                self.held.remove(sequence)
            case SequenceState.FINISHED:
                return
        sequence.state = SequenceState.FINISHED
        if self.speculator is not None:
            self.speculator.forget(sequence)
        if sequence.num_in_flight == 0:
            self.pages.release(sequence)

    # ── stepping ────────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, unplanned: UnplannedDecodes, *, now_s: float) -> StepPlan:
        """Return the next step's plan: allocates pages, preempts when they run out, admits when there is room."""
        num_unplanned = len(unplanned.sequences)
        plan = StepPlan(
            num_tokens=num_unplanned, num_decodes=num_unplanned, num_context_tokens=unplanned.num_context_tokens
        )
        if num_unplanned == len(self.running) and not self.waiting:
            return plan
        preemptions_before = self.num_preemptions
        decoding: list[tuple[Sequence, int]] = []
        prefilling: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            if sequence in unplanned.sequences:
                continue
            num_to_run = sequence.num_to_run
            if num_to_run:
                (decoding if num_to_run == 1 or sequence.is_decoding else prefilling).append((sequence, num_to_run))
        self._continue(decoding, plan)
        if prefilling or self.waiting:
            plan.max_s = self.budget.max_step_s(plan.shape, self.running, now_s=now_s)
        self._continue(prefilling, plan)
        if self.num_preemptions == preemptions_before and not plan.is_short:
            self._admit(plan)
            self._draft(plan)
        self.backlog.look_again(self.waiting)
        return plan

    def launched(self, plan: StepPlan) -> None:
        """Count the tokens of a launched step as computed, and the tokens that it samples as pending."""
        self._num_steps_in_flight += 1
        self.budget.launched(plan.shape)
        self.pages.hold_sources(plan.copies)
        row = 0
        for sequence, item in plan.batch.items():
            sequence.num_computed += item.num_new_tokens
            sequence.num_in_flight += 1
            if item.num_samples:
                sequence.num_pending += 1
                may_run_unknown = item.num_sampled == 1 and not sequence.waits_for_tokens
                sequence.pending_row = row if may_run_unknown else None
                row += item.num_sampled

    def complete(self, plan: StepPlan, results: Seq[StepResult]) -> None:
        """End the oldest step in flight: KV of every planned token exists, but that of rejected ones is void.

        The step's tokens are appended after this.
        """
        for item, result in zip(plan.batch.values(), results, strict=True):
            if result.branch is not None and item.sequence.state is SequenceState.RUNNING:
                self.pages.adopt(item.sequence, result.branch)
        self.land(plan)
        for (sequence, item), result in zip(plan.batch.items(), results, strict=True):
            if sequence.state is not SequenceState.RUNNING:
                continue
            num_new = item.num_new_tokens
            if item.draft:
                num_new -= self._reject(item, result.num_accepted)
            before = sequence.num_ready
            sequence.num_ready += num_new
            self.num_computed_tokens += max(0, min(sequence.num_ready, sequence.num_prompt_tokens) - before)
            self.pages.publish(sequence)

    def _reject(self, item: ScheduledSequence, num_accepted: int) -> int:
        """Take back the drafted tokens that a step has rejected; returns how many more it computed than it accepted.

        Negative where a longer branch was accepted.
        """
        num_rejected = len(item.draft) - num_accepted
        item.sequence.num_computed -= num_rejected
        self.pages.trim(item.sequence)
        if self.speculator is not None:
            self.speculator.verified(item, num_accepted)
        return num_rejected

    def drop(self, plan: StepPlan) -> None:
        """Release what a plan holds that cannot be launched."""
        self.pages.release_branches(plan.branches)

    def land(self, plan: StepPlan) -> None:
        """End the oldest step in flight; a failed one lands without `complete`, after its sequences are finished."""
        self._num_steps_in_flight -= 1
        self.pages.release_sources(plan.copies)
        self.pages.release_branches(plan.branches)
        for sequence, item in plan.batch.items():
            sequence.num_in_flight -= 1
            if item.num_samples:
                sequence.num_pending -= 1
            if sequence.state is SequenceState.FINISHED and sequence.num_in_flight == 0:
                self.pages.release(sequence)

    def _continue(self, items: list[tuple[Sequence, int]], plan: StepPlan) -> None:
        """Plan running sequences, each with the number of tokens that it has to run, as long as the step has room."""
        for position, (sequence, num_to_run) in enumerate(items):
            num_left = self._num_left(plan, sequence, num_to_run)
            if num_to_run > 1 and sequence.is_decoding:  # every answer behind it gets its token in this step
                num_left = self.limits.max_step_tokens - plan.num_tokens - (len(items) - position - 1)
            num_new = min(num_to_run, num_left)
            if num_new <= 0:
                return
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted by an earlier one
            if self._make_room(sequence, num_new, plan):
                plan.add(sequence, num_new, num_to_run)

    def _admit(self, plan: StepPlan) -> None:
        while self.waiting and plan.num_tokens < self.limits.max_step_tokens:
            sequence = self.waiting[0]
            if _awaits_beam(sequence):
                return
            slots = sum(s.num_samples for s in (*self.running, *self.reserved))
            if slots and slots + sequence.num_samples > self.limits.max_running and not self._is_awaited(sequence):
                return
            if self._num_left(plan, sequence, sequence.num_to_run) <= 0:
                return
            if not self._take_pages(sequence):
                return
            self._dequeue(sequence)
            sequence.state = SequenceState.RUNNING
            insort(self.running, sequence, key=_order)
            plan.admitted.append(sequence)
            self.num_cached_tokens += min(sequence.num_cached_tokens, sequence.num_prompt_tokens)
            num_new = min(sequence.num_to_run, max(1, self._num_left(plan, sequence, sequence.num_to_run)))
            plan.add(sequence, num_new, sequence.num_to_run)

    def _draft(self, plan: StepPlan) -> None:
        """Fill what is left of the step, and no page that another sequence may need, with drafted tokens."""
        if self.speculator is None:
            return
        num_free = self.pool.num_free - self._num_spared(0)
        max_tokens = self.limits.max_step_tokens - plan.num_tokens
        for sequence, draft in self.speculator.drafts_for(plan, max_tokens=max_tokens):
            num_new = 1 + len(draft.token_ids)
            num_missing = self.pages.num_missing(sequence, num_new)
            if num_missing > num_free:
                continue
            num_free -= num_missing
            self.pages.make_writable(sequence, num_new)
            branches: list[Branch] = []
            for branch in draft.branches:
                num_missing = self.pages.num_branch_blocks(sequence, branch)
                if num_missing <= num_free:
                    num_free -= num_missing
                    branches.append(branch)
                    copy = self.pages.branch_off(sequence, branch)
                    plan.copies += [] if copy is None else [copy]
            plan.add_draft(sequence, Draft(draft.token_ids, tuple(branches)), rejects=self.speculator.rejects(sequence))

    def _num_left(self, plan: StepPlan, sequence: Sequence, num_to_run: int) -> int:
        """Return how many tokens of a sequence the step can still hold: fewer of a prompt beside answers in a hurry."""
        max_tokens = self.limits.max_step_tokens
        if num_to_run == 1:
            return max_tokens - plan.num_tokens
        return self.budget.num_fitting(
            plan.shape, num_before=sequence.num_computed, max_s=plan.max_s, max_tokens=max_tokens
        )

    def _take_pages(self, first: Sequence) -> bool:
        """Give the first in line its pages, taking back blocks that were pulled for others in line when pages run out.

        False when that does not suffice.
        """
        num_spared = 0 if self._is_awaited(first) else self._num_spared(0)
        reusable = first.block_hashes[: first.num_reusable_blocks]
        while True:
            # It needs at least one page of its own: without one the search of the cache is not worth it.
            if self.pool.num_free > num_spared and self.pages.take(
                first, self.pool.match_prefix(reusable), num_spared=num_spared
            ):
                return True
            if not self._take_back_landed(self.waiting[1:]):
                return False

    def _is_awaited(self, sequence: Sequence) -> bool:
        """Whether all others that run are beams that wait for this one: they free nothing until it runs."""
        return sequence.is_beam and all(s.beams is sequence.beams for s in (*self.running, *self.reserved))

    def _take_back_landed(self, waiting: list[Sequence]) -> bool:
        """Release the pulled blocks of the latest of these that holds some; False when none does."""
        holder = next((sequence for sequence in reversed(waiting) if sequence.landed_blocks), None)
        if holder is None:
            return False
        self.pages.release_landed(holder)
        return True

    def _make_room(self, sequence: Sequence, num_new: int, plan: StepPlan) -> bool:
        """Make [num_computed, num_computed + num_new) writable, preempting later arrivals. False: it cannot run now.

        Before the first of several beams there must be room for all: none of them may become a victim once planned.
        """
        while (num_missing := self._num_missing(sequence, num_new, plan)) > self.pool.num_free:
            if self._take_back_landed(self.waiting):
                continue
            if self._num_steps_in_flight:
                plan.is_short = True
                return False
            victim = next(s for s in reversed(self.running) if not s.is_pinned)
            for each in [s for s in victim.beams or (victim,) if s.state is SequenceState.RUNNING]:
                self._preempt(each, plan)
            if sequence.state is not SequenceState.RUNNING:
                return False
        if num_missing:
            copy = self.pages.make_writable(sequence, num_new)
            if copy is not None:
                plan.copies.append(copy)
        return True

    def _num_missing(self, sequence: Sequence, num_new: int, plan: StepPlan) -> int:
        if sequence.beams is None or num_new != 1:
            return self.pages.num_missing(sequence, num_new)
        writers = [beam for beam in sequence.beams if beam.num_to_run == 1 and beam not in plan.batch]
        return self.pages.num_missing_together(writers)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        assert victim.num_in_flight == 0, f"{victim.num_in_flight} steps in flight write the pages of a victim"
        # Only decoding sequences run out of pages, and they are planned in the order of arrival.
        assert victim not in plan.batch, "a victim is planned already"
        self.running.remove(victim)
        self.pages.release(victim)
        victim.decodes_since = victim.candidates = None
        self._enqueue(victim)
        self.num_preemptions += 1

    # ── the line ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=_order)
        self.backlog.enter(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.backlog.leave(sequence)

    def _num_spared(self, headroom: int) -> int:
        """Return the pages to leave free: for running sequences to grow into, and `headroom`. 0 for a lone sequence."""
        return self._watermark_blocks + headroom if self.running or self.reserved else 0
