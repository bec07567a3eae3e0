"""Decoding without planning every step of it.

The tokens of a simulated sequence are known beforehand, so its decoding is, too: every step computes one token and
samples the next one, until the sequence ends, has filled a block, or needs a new page. Sequences that decode are left
alone until the first of these events, and then only the sequences with an event are brought up to date. The scheduler
plans all other work, prompts above all, beside them (`UnplannedDecodes`).

    boundary     0 ──── 1 ──── 2 ──── 3 ──── 4 ──── …      numbered by completed steps
    sequence A   joined ──────────────────▶ ends           due at 4
    sequence B          joined ──▶ block full              due at 3, then again

Steps that hold nothing else need no turn of the loop: the end of the n-th next step is computed, since its time is
affine in the context (`StepTimes`), which grows by one token per sequence and step.

State, events and times are the same as with steps planned one by one (tests/measure/simulate/test_leap.py).
"""

import heapq
from array import array
from collections.abc import Collection
from dataclasses import dataclass

from common.tokens import TokenArray
from common.wire_names import FinishReason
from engine.core import EngineCore
from engine.events import StepSample
from engine.sequence import Sequence, SequenceState
from engine.steps.group import Emitted, Group
from engine.steps.plan import StepPlan
from engine.steps.planner import StepPlanner
from engine.steps.scheduler import Scheduler
from measure.simulate.executor import EOS_TOKEN_ID, KnownAnswer, SimExecutor
from measure.simulate.timing import StepSegment, StepTimes
from measure.simulate.tokens import KeptTokens, TokenLog


class UnplannedDecodes(StepPlanner):
    """Plans steps that count some decoding sequences and hold none of them. Between two steps.

    These sequences are brought up to date here after steps in which they needed nothing from the host, to the same
    tokens, pages and cached blocks as after planning each step. When pages run out, all are brought up to date and the
    set is emptied before the next plan: nothing is preempted while it is not empty.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.sequences: Collection[Sequence] = ()
        self.num_context_tokens = 0
        """Tokens that the sequences read in the next step, together."""

    def take_page(self, sequence: Sequence) -> bool:
        """Take the page for the next token of a sequence whose pages are full. False when none is free."""
        if self._pool.num_free == 0:
            return False
        copy = self._pages.make_writable(sequence, 1)
        assert copy is None, f"page {copy} is shared; only full pages may be left behind"
        self._pages.attach_windows(sequence, 1)
        return True

    def advance(self, sequence: Sequence, token_ids: TokenArray) -> None:
        """Apply steps that each computed one token and sampled the next of `token_ids`.

        `take_page` was called before each step that needed a page.
        """
        sequence.num_computed += len(token_ids)
        sequence.num_ready += len(token_ids)
        sequence.append_tokens(token_ids)
        self._pages.publish(sequence)
        self._pages.windows.slide(sequence)

    def _empty_plan(self) -> StepPlan:
        return StepPlan(
            max_tokens=self._scheduler.limits.max_step_tokens,
            num_tokens=len(self.sequences),
            num_decodes=len(self.sequences),
            num_context_tokens=self.num_context_tokens,
        )

    def _to_plan(self) -> Collection[Sequence]:
        running = self._scheduler.running
        if len(running) == len(self.sequences):
            return ()
        return [sequence for sequence in running if sequence not in self.sequences]


@dataclass(slots=True, eq=False)
class _Member:
    """A decoding sequence, up to date as of boundary `since`."""

    sequence: Sequence
    group: Group
    answer: KnownAnswer
    since: int
    num_context_tokens: int
    """Context tokens of its next step after `since`."""
    due: int = -1
    """Boundary of its next event."""


class DecodeLeap:
    """The decoding sequences of one engine. Between two steps: `complete`, `gather`, then `run` or `step`."""

    def __init__(self, core: EngineCore, times: StepTimes, log: TokenLog, kept: KeptTokens) -> None:
        assert isinstance(core.executor, SimExecutor), "tokens must be known before their steps are computed"
        self._core = core
        self._unplanned = core.planner = UnplannedDecodes(core.scheduler)
        self._executor = core.executor
        self._times = times
        self._log = log
        self._kept = kept
        self._members: dict[Sequence, _Member] = {}
        self._running: list[Sequence] = []
        """All running sequences, others included, at the last look."""
        self._num_context_tokens = 0
        """Context tokens of the members' next step."""
        self._due: list[tuple[int, int, _Member]] = []
        """(boundary, place in line, member). Entries of members that have left or have a later event are skipped."""
        self._needy: list[_Member] = []
        """Members that need a page for the next step."""
        self._segment: StepSegment | None = None
        self._boundary = 0
        self._ends_s: array[float] = array("d")
        """Times of the boundaries from 1 to `_boundary`."""
        self._now_s = 0.0
        self._samples: list[StepSample] = []
        self.num_steps = 0
        """Steps without other work, up to the last change."""
        self.busy_s = 0.0
        """Time of these steps."""

    @property
    def is_running(self) -> bool:
        """Whether the running steps hold nothing but decodes."""
        return self._segment is not None and self._segment.is_pure

    def num_tokens_behind(self, now_s: float) -> int:
        """Return by how many tokens the members' sequences are behind, in total."""
        boundary = self._boundary
        if self.is_running:
            boundary, _ends_s = self._last_boundary(now_s)
        return sum(boundary - member.since for member in self._members.values())

    def busy_until(self, now_s: float) -> float:
        """Return the time of steps without other work up to now, including the running one."""
        segment = self._segment
        return self.busy_s + (now_s - segment.start_s if segment is not None and segment.is_pure else 0.0)

    def drain_samples(self) -> tuple[StepSample, ...]:
        """Return the step times since the last call, one sample for each composition of the batch."""
        samples, self._samples = tuple(self._samples), []
        return samples

    # ── between steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def gather(self, now_s: float) -> int:
        """Add sequences that decode now, drop those that are gone, and allocate the pages that the next step needs.

        Returns the number of members. It is 0 when pages run out: the scheduler decides what to preempt, so all
        sequences are brought up to date and planned by it in the next step.
        """
        self._now_s = now_s
        self._regroup()
        needy, self._needy = sorted(self._needy, key=lambda member: member.sequence.order), []
        for member in needy:
            if member.sequence not in self._members:
                continue
            if not self._unplanned.take_page(member.sequence):
                self.leave()
                break
            self._plan(member)
        self._unplanned.sequences = self._members
        self._unplanned.num_context_tokens = self._num_context_tokens
        return len(self._members)

    def run(self) -> tuple[int, float]:
        """Take steps with nothing but decodes until `complete`. Returns boundary and time of the next event."""
        if not self.is_running:
            constant_s, per_context_token_s = self._times.decode_line(len(self._members))
            self._open(constant_s, per_context_token_s, is_pure=True)
        return self._next_due()

    def step(self, seconds: float) -> None:
        """Take one step that other work shares."""
        self._open(seconds, 0.0, is_pure=False)

    def leave(self) -> None:
        """Bring every sequence up to date and drop all members. At a completed boundary."""
        self._close_segment()
        for member in self._members.values():
            self._catch_up(member)
        self._members, self._running, self._due, self._needy = {}, [], [], []
        self._num_context_tokens = 0

    def break_off(self, now_s: float) -> None:
        """Like `leave`, at any time; the running step is lost."""
        if self.is_running:
            self.complete(*self._last_boundary(now_s))
        self.leave()

    def complete(self, boundary: int, now_s: float) -> Emitted:
        """End all steps up to a boundary, which has the first event. Returns its events."""
        if boundary > self._boundary:
            assert self._segment is not None, "nothing runs"
            self._ends_s.extend(map(self._segment.end_s, range(self._boundary + 1, boundary)))
            self._ends_s.append(now_s)
        self._num_context_tokens += (boundary - self._boundary) * len(self._members)
        self._boundary, self._now_s = boundary, now_s
        due: list[_Member] = []
        while self._due and self._due[0][0] <= boundary:
            entry = heapq.heappop(self._due)
            if self._is_valid(entry):
                due.append(entry[2])
        for member in due:
            self._catch_up(member)
        emitted: Emitted = []
        for member in due:
            sequence = member.sequence
            reason = _finish_reason(sequence)
            if reason is None:
                self._plan(member)
            else:
                self._core.finish_sample(member.group, sequence.sample_index)
                emitted.append((member.group, self._kept.flush(member.group, reason)))
        return emitted

    def complete_step(self, now_s: float) -> Emitted:
        """End the step that other work shared."""
        return self.complete(self._boundary + 1, now_s)

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_boundary(self, now_s: float) -> tuple[int, float]:
        """Return the boundary at which the running step ends, and its time; commands run then. While `is_running`."""
        assert self._segment is not None, "nothing runs"
        boundary = max(self._segment.first_boundary_at(now_s), self._boundary + 1)
        return boundary, self._segment.end_s(boundary)

    def _last_boundary(self, now_s: float) -> tuple[int, float]:
        """Return the latest boundary reached, and its time."""
        assert self._segment is not None, "nothing runs"
        boundary, ends_s = self.next_boundary(now_s)
        return (boundary, ends_s) if ends_s <= now_s else (boundary - 1, self._segment.end_s(boundary - 1))

    def _next_due(self) -> tuple[int, float]:
        assert self._segment is not None, "nothing runs"
        while not self._is_valid(self._due[0]):
            heapq.heappop(self._due)
        boundary = self._due[0][0]
        return boundary, self._segment.end_s(boundary)

    # ── segments ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, constant_s: float, per_context_token_s: float, *, is_pure: bool) -> None:
        self._close_segment()
        self._segment = StepSegment(
            start=self._boundary,
            start_s=self._now_s,
            constant_s=constant_s,
            per_context_token_s=per_context_token_s,
            num_sequences=len(self._members),
            num_context_tokens=self._num_context_tokens,
            is_pure=is_pure,
        )

    def _close_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None or segment.start == self._boundary or not segment.is_pure:
            return  # the engine counts steps with other work
        self.num_steps += self._boundary - segment.start
        self.busy_s += self._now_s - segment.start_s
        self._samples.append(segment.mean_step(self._boundary, self._now_s))

    # ── members ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _regroup(self) -> None:
        """Make the sequences that decode now the members."""
        running, members = self._core.scheduler.running, self._members
        has_changed = running != self._running
        if not has_changed and len(running) == len(members):
            return
        come = [sequence for sequence in running if sequence not in members and _can_join(sequence)]
        gone: list[_Member] = []
        if has_changed:
            self._running = running[:]
            gone = [member for member in members.values() if member.sequence.state is not SequenceState.RUNNING]
        if come or gone:
            self._close_segment()
        for member in gone:
            del members[member.sequence]
            self._num_context_tokens -= member.num_context_tokens + self._boundary - member.since
        for sequence in come:
            self._join(sequence)

    def _join(self, sequence: Sequence) -> None:
        member = _Member(
            sequence=sequence,
            group=self._core.groups[sequence],
            answer=self._executor.answer(sequence),
            since=self._boundary,
            num_context_tokens=sequence.num_tokens,
        )
        self._members[sequence] = member
        self._num_context_tokens += sequence.num_tokens
        self._plan(member)

    def _plan(self, member: _Member) -> None:
        """Find the next event of an up-to-date member."""
        sequence = member.sequence
        size, num_computed = sequence.block_size, sequence.num_computed
        num_with_pages = len(sequence.block_table) * size - num_computed
        if num_with_pages <= 0:
            self._needy.append(member)
            return
        num_steps = min(
            num_with_pages,
            size - num_computed % size,
            member.answer.num_tokens - sequence.num_output_tokens,
            sequence.max_num_tokens - sequence.num_tokens,
        )
        member.due = self._boundary + max(1, num_steps)
        heapq.heappush(self._due, (member.due, sequence.order, member))

    def _catch_up(self, member: _Member) -> None:
        """Apply the steps that a sequence has taken since it was up to date."""
        num_steps = self._boundary - member.since
        sequence = member.sequence
        if num_steps == 0 or sequence.state is not SequenceState.RUNNING:
            return
        start = sequence.num_output_tokens
        token_ids = member.answer.run(start, start + num_steps)
        self._unplanned.advance(sequence, token_ids)
        self._kept.extend(member.group, start, token_ids)
        self._log.note(sequence.request.request_id, start, self._ends_s[member.since : self._boundary])
        member.since = self._boundary
        member.num_context_tokens += num_steps

    def _is_valid(self, entry: tuple[int, int, _Member]) -> bool:
        member = entry[2]
        return member.due == entry[0] and self._members.get(member.sequence) is member


def _can_join(sequence: Sequence) -> bool:
    """Return whether a sequence's next step decodes a token that is not read before the answer is complete."""
    sampling = sequence.request.sampling
    return (
        sequence.num_tokens - sequence.num_computed == 1
        and sequence.num_output_tokens > 0
        and not sampling.detokenize
        and sampling.n == 1
    )


def _finish_reason(sequence: Sequence) -> FinishReason | None:
    if sequence.token_ids[-1] == EOS_TOKEN_ID:
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_tokens >= sequence.max_num_tokens else None
