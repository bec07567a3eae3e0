"""Which sequences run in the next step, and on which pages.

One step mixes decode tokens (first) and prefill chunks (with the rest of the token budget). A sequence goes

    WAITING ──admit──▶ RUNNING ──hold──▶ HELD          (prefill worker: pages stay for the puller)
       ▲                 │ ▲
       └────preempt──────┘ └──start── RESERVED          (decode worker: pages that a transfer fills)

and from everywhere to FINISHED, when its pages are released. Preemption takes the latest arrival's pages; it is
computed again later, from whatever the prefix cache still holds, and keeps its place in line.
"""

from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.errors import Refused
from common.ids import BlockId
from engine.block_pool import BlockPool
from engine.executor import ScheduledSequence
from engine.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one engine."""

    block_size: int
    max_step_tokens: int
    max_running: int
    max_waiting: int
    watermark: float = 0.01
    """Share of the pages that admission leaves free for the growth of running sequences, so that it does not thrash."""


@dataclass(slots=True)
class StepPlan:
    """One step: pages to copy first (copy-on-write), then what to compute."""

    batch: dict[Sequence, ScheduledSequence] = field(default_factory=dict)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order, sequence.sample_index


class Scheduler:
    """Owns the queues and every sequence's block table. Engine thread only."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.held: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self._watermark_blocks = max(1, round(limits.watermark * pool.num_blocks))

    @property
    def has_work(self) -> bool:
        """Whether `schedule` could find something to do."""
        return bool(self.waiting or self.running)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.limits.block_size)

    # ── entering ────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, sequence: Sequence) -> Refused | None:
        """Put a sequence in line."""
        if len(self.waiting) >= self.limits.max_waiting:
            return Refused(reason=f"{len(self.waiting)} sequences are waiting already", retry_after_s=1.0)
        insort(self.waiting, sequence, key=_order)
        return None

    def reserve(self, sequence: Sequence) -> Refused | None:
        """Grant pages for all known tokens, to be filled by a transfer, or refuse. Sets num_cached and num_computed."""
        slots = sum(s.num_samples for s in (*self.running, *self.reserved, *self.waiting))
        if slots and slots + sequence.num_samples > self.limits.max_running:
            return Refused(reason=f"{slots} sequences are running or about to", retry_after_s=0.5)
        if self.waiting:
            return Refused(reason="sequences are waiting for pages", retry_after_s=0.5)
        cached = self.pool.match_prefix(sequence.block_hashes)
        headroom = sequence.num_samples  # every sample is about to write its next token
        if not self._take_pages(sequence, cached, headroom=headroom):
            return Refused(reason=f"{self.pool.num_free} pages are free; too few for this prompt", retry_after_s=0.5)
        sequence.state = SequenceState.RESERVED
        self.reserved.append(sequence)
        return None

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """A transfer has verified the KV of the first `num_tokens` tokens of a reservation."""
        assert sequence.state is SequenceState.RESERVED, sequence.state
        assert sequence.num_computed <= num_tokens <= sequence.num_tokens, (sequence.num_computed, num_tokens)
        sequence.num_computed = num_tokens
        self._publish(sequence)

    def start(self, sequence: Sequence) -> None:
        """Let a completely filled reservation run."""
        assert sequence.num_computed == sequence.num_tokens, f"{sequence.num_computed} of {sequence.num_tokens} tokens"
        self.reserved.remove(sequence)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_order)

    def fork(self, leader: Sequence, num_children: int) -> list[Sequence]:
        """Return further samples of a running prompt; they share all its pages until they write."""
        children = [leader.fork(leader.sample_index + 1 + i) for i in range(num_children)]
        for child in children:
            self.pool.acquire(child.block_table)
            insort(self.running, child, key=_order)
        return children

    # ── leaving ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, sequence: Sequence) -> None:
        """Take a computed prompt out of the batch and keep its pages."""
        self.running.remove(sequence)
        sequence.state = SequenceState.HELD
        self.held.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Release everything that a sequence holds, in whatever state it is. Harmless when finished already."""
        queue = {
            SequenceState.WAITING: self.waiting,
            SequenceState.RUNNING: self.running,
            SequenceState.RESERVED: self.reserved,
            SequenceState.HELD: self.held,
        }.get(sequence.state)
        if queue is None:
            return
        queue.remove(sequence)
        self._release_pages(sequence)
        sequence.state = SequenceState.FINISHED

    # ── stepping ────────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> StepPlan:
        """Plan the next step: allocates pages, preempts when they run out, admits when there is room."""
        plan = StepPlan()
        preemptions_before = self.num_preemptions
        decoding = [s for s in self.running if s.num_tokens - s.num_computed == 1]
        prefilling = [s for s in self.running if s.num_tokens - s.num_computed > 1]
        for sequence in (*decoding, *prefilling):
            budget = self.limits.max_step_tokens - plan.num_tokens
            if budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted by an earlier one in this very loop
            num_new = min(sequence.num_tokens - sequence.num_computed, budget)
            if self._make_room(sequence, num_new, plan):
                self._plan(sequence, num_new, plan)
        if self.num_preemptions == preemptions_before:
            self._admit(plan)
        return plan

    def complete(self, plan: StepPlan) -> None:
        """Account for an executed step: KV of every planned token now exists."""
        for sequence, item in plan.batch.items():
            before = sequence.num_computed
            sequence.num_computed += item.num_new_tokens
            self.num_computed_tokens += max(0, min(sequence.num_computed, sequence.num_prompt_tokens) - before)
            self._publish(sequence)

    def _admit(self, plan: StepPlan) -> None:
        while self.waiting and plan.num_tokens < self.limits.max_step_tokens:
            sequence = self.waiting[0]
            slots = sum(s.num_samples for s in (*self.running, *self.reserved))
            if slots and slots + sequence.num_samples > self.limits.max_running:
                return
            # The last token is always computed: its logits choose the next one.
            reusable = sequence.block_hashes[: (sequence.num_tokens - 1) // self.limits.block_size]
            if sequence.request.sampling.num_prompt_logprobs is not None and sequence.num_output_tokens == 0:
                reusable = []  # logits of every prompt position are needed
            if not self._take_pages(sequence, self.pool.match_prefix(reusable), headroom=0):
                return
            self.waiting.pop(0)
            sequence.state = SequenceState.RUNNING
            insort(self.running, sequence, key=_order)
            plan.admitted.append(sequence)
            self.num_cached_tokens += min(sequence.num_cached, sequence.num_prompt_tokens)
            budget = self.limits.max_step_tokens - plan.num_tokens
            self._plan(sequence, min(sequence.num_tokens - sequence.num_computed, budget), plan)

    def _plan(self, sequence: Sequence, num_new: int, plan: StepPlan) -> None:
        is_last_chunk = sequence.num_computed + num_new == sequence.num_tokens
        num_samples = sequence.num_samples if is_last_chunk else 0
        plan.batch[sequence] = ScheduledSequence(sequence, num_new, num_samples)
        plan.num_tokens += num_new

    # ── pages ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_pages(self, sequence: Sequence, cached: Seq[BlockId], *, headroom: int) -> bool:
        """Give a sequence its cached prefix and fresh pages for all other known tokens, if they are there."""
        num_fresh = self.num_blocks_for(sequence.num_tokens) - len(cached)
        others_grow = bool(self.running or self.reserved)
        spare = self._watermark_blocks + headroom if others_grow else 0
        if num_fresh + spare > self.pool.num_free - self.pool.num_matched_free(cached):
            return False
        self.pool.acquire(cached)
        sequence.block_table = [*cached, *self.pool.allocate(num_fresh)]
        sequence.num_cached = sequence.num_computed = len(cached) * self.limits.block_size
        sequence.num_published = len(cached)
        return True

    def _make_room(self, sequence: Sequence, num_new: int, plan: StepPlan) -> bool:
        """Make [num_computed, num_computed + num_new) writable, preempting later arrivals; False: it was the last."""
        first = sequence.num_computed // self.limits.block_size
        shares_tail = first < len(sequence.block_table) and not self.pool.is_writable(sequence.block_table[first])
        num_fresh = max(0, self.num_blocks_for(sequence.num_computed + num_new) - len(sequence.block_table))
        while self.pool.num_free < num_fresh + shares_tail:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
            shares_tail = shares_tail and not self.pool.is_writable(sequence.block_table[first])
        if shares_tail:
            shared = sequence.block_table[first]
            assert first >= sequence.num_published, f"block {shared} is published and cannot be written"
            (copy,) = self.pool.allocate(1)
            plan.copies.append((shared, copy))
            sequence.block_table[first] = copy
            self.pool.release([shared])
        sequence.block_table.extend(self.pool.allocate(num_fresh))
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        planned = plan.batch.pop(victim, None)
        if planned is not None:
            plan.num_tokens -= planned.num_new_tokens
        self.running.remove(victim)
        self._release_pages(victim)
        victim.state = SequenceState.WAITING
        insort(self.waiting, victim, key=_order)
        self.num_preemptions += 1

    def _release_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        self.pool.release(sequence.retired_blocks)
        sequence.block_table, sequence.retired_blocks = [], []
        sequence.num_computed = sequence.num_cached = sequence.num_published = 0

    def _publish(self, sequence: Sequence) -> None:
        """Put computed full blocks into the prefix cache, each behind its published parent.

        Where a sibling was faster, its page takes the place of ours in the block table, so that what follows can be
        published too. Our page stays held to the end: a puller may be reading it.
        """
        num_full = min(sequence.num_computed // self.limits.block_size, len(sequence.block_hashes))
        while sequence.num_published < num_full:
            i = sequence.num_published
            own = sequence.block_table[i]
            published = self.pool.publish(own, sequence.block_hashes[i])
            if published != own:
                self.pool.acquire([published])
                sequence.block_table[i] = published
                sequence.retired_blocks.append(own)
            sequence.num_published += 1
