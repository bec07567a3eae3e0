"""Chooses the sequences and pages of the next step.

A step mixes decode tokens (first) and prefill chunks (with the rest of the token budget). When pages run out, the
latest arrival is preempted. Beams of one request are preempted together (`engine/beams.py`): none of them could go on
without the others.

A plan made while an earlier step is in flight, whose tokens are not known yet, never preempts: when pages run out,
sequences without one skip the step and the plan `is_short`. The next plan is then made with nothing in flight, and can
preempt.
"""

from collections.abc import Collection

from engine.executor import Branch
from engine.sequence import Sequence, SequenceState
from engine.speculation.drafter import Draft
from engine.steps.plan import StepPlan
from engine.steps.scheduler import Scheduler


def _awaits_beam(sequence: Sequence) -> bool:
    """Whether a preempted beam has to wait for another one, whose blocks it may then find in the cache.

    Beams are computed again one after the other, so that they share their pages again.
    """
    running = (beam for beam in sequence.beams or () if beam.state is SequenceState.RUNNING)
    return any(beam.candidates is None for beam in running)


class StepPlanner:
    """Plans steps over a scheduler's sequences. Engine thread only."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._pages = scheduler.pages
        self._budget = scheduler.budget

    def plan(self, *, now_s: float) -> StepPlan:
        """Return the next step's plan: allocates pages, preempts when they run out, admits when there is room."""
        scheduler, plan, running = self._scheduler, self._empty_plan(), self._to_plan()
        if not running and not scheduler.waiting:
            return plan
        preemptions_before = scheduler.num_preemptions
        decoding: list[tuple[Sequence, int]] = []
        prefilling: list[tuple[Sequence, int]] = []
        for sequence in running:
            num_to_run = sequence.num_to_run
            if num_to_run:
                (decoding if num_to_run == 1 or sequence.is_decoding else prefilling).append((sequence, num_to_run))
        self._continue(decoding, plan)
        if prefilling or scheduler.waiting:
            plan.max_s = self._budget.max_step_s(plan.shape, scheduler.running, now_s=now_s)
        self._continue(prefilling, plan)
        if scheduler.num_preemptions == preemptions_before and not plan.is_short:
            self._admit(plan)
            self._draft(plan)
        scheduler.backlog.look_again(scheduler.waiting)
        return plan

    def _empty_plan(self) -> StepPlan:
        """Return the plan of a step that holds nothing yet."""
        return StepPlan(max_tokens=self._scheduler.limits.max_step_tokens)

    def _to_plan(self) -> Collection[Sequence]:
        """Return the running sequences that the step may compute."""
        return self._scheduler.running

    def _continue(self, items: list[tuple[Sequence, int]], plan: StepPlan) -> None:
        """Plan running sequences, each with the number of tokens that it has to run, as long as the step has room."""
        for position, (sequence, num_to_run) in enumerate(items):
            num_left = self._num_left(plan, sequence, num_to_run)
            if num_to_run > 1 and sequence.is_decoding:  # every answer behind it gets its token in this step
                num_left = plan.max_tokens - plan.num_tokens - (len(items) - position - 1)
            num_new = min(num_to_run, num_left)
            if num_new <= 0:
                return
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted by an earlier one
            num_new = self._pages.windows.num_fitting(sequence, num_new)
            if self._make_room(sequence, num_new, plan):
                self._pages.attach_windows(sequence, num_new)
                plan.add(sequence, num_new, num_to_run)

    def _admit(self, plan: StepPlan) -> None:
        scheduler = self._scheduler
        while scheduler.waiting and plan.num_tokens < plan.max_tokens:
            sequence = scheduler.waiting[0]
            if _awaits_beam(sequence):
                return
            slots = sum(s.num_samples for s in (*scheduler.running, *scheduler.reserved))
            max_running = scheduler.limits.max_running
            if slots and slots + sequence.num_samples > max_running and not self._is_awaited(sequence):
                return
            if self._num_left(plan, sequence, sequence.num_to_run) <= 0:
                return
            if not self._take_pages(sequence):
                return
            scheduler.admit(sequence)
            plan.admitted.append(sequence)
            num_new = min(sequence.num_to_run, max(1, self._num_left(plan, sequence, sequence.num_to_run)))
            num_new = self._pages.windows.num_fitting(sequence, num_new)
            self._pages.attach_windows(sequence, num_new)
            plan.add(sequence, num_new, sequence.num_to_run)

    def _draft(self, plan: StepPlan) -> None:
        """Fill what is left of the step, and no page that another sequence may need, with drafted tokens."""
        speculator = self._scheduler.speculator
        if speculator is None:
            return
        num_free = self._pool.num_free - self._scheduler.num_spared(0)
        for sequence, draft in speculator.drafts_for(plan, max_tokens=plan.max_tokens - plan.num_tokens):
            num_new = 1 + len(draft.token_ids)
            num_missing = self._pages.num_missing(sequence, num_new)
            if num_missing > num_free or self._pages.windows.num_fitting(sequence, num_new) < num_new:
                continue
            num_free -= num_missing
            self._pages.make_writable(sequence, num_new)
            self._pages.attach_windows(sequence, num_new)
            branches: list[Branch] = []
            for branch in draft.branches if self._pool.windows is None else ():
                num_missing = self._pages.num_branch_blocks(sequence, branch)
                if num_missing <= num_free:
                    num_free -= num_missing
                    branches.append(branch)
                    copy = self._pages.branch_off(sequence, branch)
                    plan.copies += [] if copy is None else [copy]
            plan.add_draft(sequence, Draft(draft.token_ids, tuple(branches)), rejects=speculator.rejects(sequence))

    def _num_left(self, plan: StepPlan, sequence: Sequence, num_to_run: int) -> int:
        """Return how many tokens of a sequence the step can still hold: fewer of a prompt beside answers in a hurry."""
        if num_to_run == 1:
            return plan.max_tokens - plan.num_tokens
        return self._budget.num_fitting(
            plan.shape, num_before=sequence.num_computed, max_s=plan.max_s, max_tokens=plan.max_tokens
        )

    def _take_pages(self, first: Sequence) -> bool:
        """Give the first in line its pages, taking back blocks that were pulled for others in line when pages run out.

        False when that does not suffice.
        """
        num_spared = 0 if self._is_awaited(first) else self._scheduler.num_spared(0)
        reusable = first.block_hashes[: first.num_reusable_blocks]
        while True:
            # It needs at least one page of its own: without one the search of the cache is not worth it.
            if self._pool.num_free > num_spared and self._pages.take(
                first, self._pool.match_prefix(reusable), num_spared=num_spared
            ):
                return True
            if not self._take_back_landed(self._scheduler.waiting[1:]):
                return False

    def _is_awaited(self, sequence: Sequence) -> bool:
        """Whether all others that run are beams that wait for this one: they free nothing until it runs."""
        return sequence.is_beam and all(
            s.beams is sequence.beams for s in (*self._scheduler.running, *self._scheduler.reserved)
        )

    def _take_back_landed(self, waiting: list[Sequence]) -> bool:
        """Release the pulled blocks of the latest of these that holds some; False when none does."""
        holder = next((sequence for sequence in reversed(waiting) if sequence.landed_blocks), None)
        if holder is None:
            return False
        self._pages.release_landed(holder)
        return True

    def _make_room(self, sequence: Sequence, num_new: int, plan: StepPlan) -> bool:
        """Make [num_computed, num_computed + num_new) writable, preempting later arrivals. False: it cannot run now.

        Before the first of several beams there must be room for all: none of them may become a victim once planned.
        """
        while (num_missing := self._num_missing(sequence, num_new, plan)) > self._pool.num_free:
            if self._take_back_landed(self._scheduler.waiting):
                continue
            if self._scheduler.num_steps_in_flight:
                plan.is_short = True
                return False
            victim = next(s for s in reversed(self._scheduler.running) if not s.is_pinned)
            for each in [s for s in victim.beams or (victim,) if s.state is SequenceState.RUNNING]:
                # Only decoding sequences run out of pages, and they are planned in the order of arrival.
                assert each not in plan.batch, "a victim is planned already"
                self._scheduler.preempt(each)
            if sequence.state is not SequenceState.RUNNING:
                return False
        if num_missing:
            copy = self._pages.make_writable(sequence, num_new)
            if copy is not None:
                plan.copies.append(copy)
        return True

    def _num_missing(self, sequence: Sequence, num_new: int, plan: StepPlan) -> int:
        if sequence.beams is None or num_new != 1:
            return self._pages.num_missing(sequence, num_new)
        writers = [beam for beam in sequence.beams if beam.num_to_run == 1 and beam not in plan.batch]
        return self._pages.num_missing_together(writers)
