"""The life cycle of an engine's sequences: in line, in the batch, in flight, and out.

A sequence goes

    WAITING ──admit──▶ RUNNING ──hold──▶ HELD          (prefill worker: pages stay for the puller)
       ▲                 │ ▲
       └────preempt──────┘ └──start── RESERVED          (decode worker: pages that a transfer fills)

and from any state to FINISHED. Its pages are then released: at once, or with the last step in flight that may still
write them. A preempted sequence keeps its place in line and is computed again later, from what the prefix cache still
holds. When to admit and whom to preempt is decided by `engine.steps.planner`.
"""

from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.errors import Refused
from engine.executor import ScheduledSequence, StepResult
from engine.pages.block_pool import BlockPool
from engine.sequence import Sequence, SequenceState
from engine.steps.backlog import Backlog
from engine.steps.block_tables import Pages
from engine.steps.budget import StepBudget
from engine.steps.plan import StepPlan
from engine.steps.speculator import Speculator


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
        self.num_steps_in_flight = 0
        """Launched steps that have not landed."""
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.backlog = Backlog(pool, limits.block_size)
        """Work of the waiting sequences."""
        self.pages = Pages(pool, limits.block_size)
        self.budget = StepBudget()
        self.speculator = speculator
        self._watermark_blocks = max(1, round(limits.watermark * pool.num_blocks))

    def change_limits(self, limits: SchedulerLimits) -> None:
        """Change the bounds from the next step on. Admitted sequences stay, even above the new limits."""
        assert limits.block_size == self.limits.block_size, "pages keep their size"
        self.limits = limits
        self._watermark_blocks = max(1, round(limits.watermark * self.pool.num_blocks))

    @property
    def has_work(self) -> bool:
        """Whether a plan could find something to do."""
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
        return self.num_spared(0) + self._num_awaited(self.waiting[:1])

    def _num_awaited(self, waiting: Seq[Sequence]) -> int:
        """Return the free pages that waiting sequences take if they find none cached."""
        return sum(self.pages.num_blocks_for(each.num_tokens) - len(each.landed_blocks) for each in waiting)

    # ── entering ────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, sequence: Sequence) -> Refused | None:
        """Put a sequence in line."""
        if len(self.waiting) >= self.limits.max_waiting:
            return Refused(reason=f"{len(self.waiting)} sequences are waiting already", retry_after_s=1.0)
        self._enqueue(sequence)
        return None

    def reserve(self, sequence: Sequence) -> Refused | None:
        """Grant pages for all known tokens, which a transfer fills, or refuse; see `Pages.take` for what it sets.

        Sequences in line come first: what they need stays free.
        """
        slots = self._num_slots
        if slots and slots + sequence.num_samples > self.limits.max_running:
            return Refused(reason=f"{slots} sequences are running or about to run", retry_after_s=0.5)
        # The last token of beams is computed here: its candidates are needed.
        hashes = sequence.block_hashes[: sequence.num_reusable_blocks] if sequence.is_beam else sequence.block_hashes
        cached = self.pool.match_prefix(hashes)
        # Every sample writes its next token soon.
        num_spared = self.num_spared(sequence.num_samples) + self._num_awaited(self.waiting)
        if not self.pages.take(sequence, cached, num_spared=num_spared, ahead=self.waiting):
            reason = f"{self.pool.num_free} pages are free; too few for this prompt beside those in line"
            return Refused(reason=reason, retry_after_s=0.5)
        windows = self.pages.windows
        windows.skip_to(sequence, sequence.num_tokens)
        sequence.awaited_windows = windows.ids_of(sequence.block_table, sequence.window_blocks)
        sequence.enter(SequenceState.RESERVED)
        self.reserved.append(sequence)
        return None

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the KV of a reservation's first `num_tokens` tokens as ready: a transfer has verified it."""
        assert sequence.state is SequenceState.RESERVED, sequence.state
        assert sequence.num_computed <= num_tokens <= sequence.num_tokens, (sequence.num_computed, num_tokens)
        sequence.num_ready = sequence.num_computed = num_tokens
        self.pages.publish(sequence)

    def start(self, sequence: Sequence) -> None:
        """Let a completely filled reservation run; one for beam search is filled without the last token."""
        num_filled = sequence.num_tokens - sequence.is_beam
        assert sequence.num_computed == num_filled, f"{sequence.num_computed} of {num_filled} tokens"
        self.reserved.remove(sequence)
        self.pages.windows.slide(sequence)
        sequence.enter(SequenceState.RUNNING)
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

    def admit(self, sequence: Sequence) -> None:
        """Let a waiting sequence run, which has its pages."""
        self._dequeue(sequence)
        sequence.enter(SequenceState.RUNNING)
        insort(self.running, sequence, key=_order)
        self.num_cached_tokens += min(sequence.num_cached_tokens, sequence.num_prompt_tokens)

    def preempt(self, victim: Sequence) -> None:
        """Put a running sequence back in line, without its pages. No step in flight may write them."""
        assert victim.num_in_flight == 0, f"{victim.num_in_flight} steps in flight write the pages of a victim"
        self.running.remove(victim)
        self.pages.release(victim)
        victim.decodes_since = victim.candidates = None
        self._enqueue(victim)
        self.num_preemptions += 1

    def fork(self, parent: Sequence, sample_index: int) -> Sequence:
        """Return another sample that continues a running sequence; they share all pages until they write."""
        child = parent.fork(sample_index)
        self.pages.share(parent, child)
        insort(self.running, child, key=_order)
        return child

    # ── leaving ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, sequence: Sequence) -> None:
        """Take a computed prompt out of the batch and keep its pages."""
        self.running.remove(sequence)
        sequence.enter(SequenceState.HELD)
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
        sequence.enter(SequenceState.FINISHED)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        if sequence.num_in_flight == 0:
            self.pages.release(sequence)

    # ── in flight ────────────────────────────────────────────────────────────────────────────────────────────────────

    def launched(self, plan: StepPlan) -> None:
        """Count the tokens of a launched step as computed, and the tokens that it samples as pending."""
        self.num_steps_in_flight += 1
        self.budget.launched(plan.shape)
        self.pages.end_plan()
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
            self.pages.windows.slide(sequence)

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
        self.pages.end_plan()
        self.pages.release_sources(plan.copies)
        self.pages.release_branches(plan.branches)

    def land(self, plan: StepPlan) -> None:
        """End the oldest step in flight; a failed one lands without `complete`, after its sequences are finished."""
        self.num_steps_in_flight -= 1
        self.pages.release_sources(plan.copies)
        self.pages.release_branches(plan.branches)
        for sequence, item in plan.batch.items():
            sequence.num_in_flight -= 1
            if item.num_samples and not item.is_overtaken:
                sequence.num_pending -= 1
            if sequence.state is SequenceState.FINISHED and sequence.num_in_flight == 0:
                self.pages.release(sequence)

    # ── the line ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.enter(SequenceState.WAITING)
        insort(self.waiting, sequence, key=_order)
        self.backlog.enter(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.backlog.leave(sequence)

    def num_spared(self, headroom: int) -> int:
        """Return the pages to leave free: for running sequences to grow into, and `headroom`. 0 for a lone sequence."""
        return self._watermark_blocks + headroom if self.running or self.reserved else 0
