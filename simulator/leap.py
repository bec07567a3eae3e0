"""Steps of a batch that only decodes, taken without taking them one by one.

As long as such a batch stays together, step after step does the same: each sequence computes one token and samples the
next one. All that can happen to a sequence by itself is known beforehand: it ends, it fills a block, or it needs a new
page. So the batch is left alone until the first of these, and then only the sequences that it happens to are brought up
to date. A step's end is computed from when the batch last changed: its time is affine in the context (`StepTimes`),
which grows by one token per sequence and step.

    steps        0 ──── 1 ──── 2 ──── 3 ──── 4 ──── …      boundaries are numbered by the steps completed
    sequence A   joined ──────────────────▶ ends           due at 4
    sequence B          joined ──▶ block full              due at 3, then again

The outcome, in state, events and times, is that of the same steps taken one by one (tests/simulator/test_leap.py).
"""

import heapq
import math
from dataclasses import dataclass

from common.timing import StepShape
from engine.core import Emitted, EngineCore
from engine.events import FinishReason, StepSample
from engine.sequence import Sequence, SequenceState
from simulator.bundle import KeptTokens
from simulator.executor import EOS_TOKEN_ID, Answer, SimExecutor
from simulator.timing import StepTimes
from simulator.token_log import TokenLog


@dataclass(slots=True, eq=False)
class _Member:
    """A sequence of the batch, up to date as of boundary `since`."""

    sequence: Sequence
    answer: Answer
    since: int
    num_context_tokens: int
    """That its next step reads, as of then."""
    first_gap_s: float
    """From its last token to the end of its first step here; 0 once that is noted."""
    first_segment: int
    """Index of the segment that it joined."""
    due: int = -1
    """Boundary at which something happens to it."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Steps of one composition of the batch."""

    start: int
    """Boundary."""
    start_s: float
    constant_s: float
    """Of a step without context."""
    per_context_token_s: float
    num_sequences: int
    num_joined: int
    num_context_tokens: int
    """In the first step."""

    def context_at(self, boundary: int) -> int:
        """Return the context tokens of the step behind a boundary."""
        return self.num_context_tokens + self.num_sequences * (boundary - self.start)

    def end_s(self, boundary: int) -> float:
        """Return when a boundary is reached."""
        n = boundary - self.start
        context = n * self.num_context_tokens + self.num_sequences * (n * (n - 1) // 2)
        return self.start_s + n * self.constant_s + context * self.per_context_token_s

    def step_s(self, boundary: int) -> float:
        """Return how long the step before a boundary takes."""
        return self.constant_s + self.context_at(boundary - 1) * self.per_context_token_s

    def first_boundary_at(self, time_s: float) -> int:
        """Return the first boundary at or after a time."""
        square = self.per_context_token_s * self.num_sequences / 2
        linear = self.constant_s + self.per_context_token_s * self.num_context_tokens - square
        left_s = time_s - self.start_s
        root = math.sqrt(linear * linear + 4 * square * left_s)
        boundary = self.start + max(1, int(2 * left_s / (linear + root)))
        while self.end_s(boundary) < time_s:
            boundary += 1
        while boundary > self.start + 1 and self.end_s(boundary - 1) >= time_s:
            boundary -= 1
        return boundary


class DecodeLeap:
    """The batch of one engine while it only decodes. Between `enter` and `leave` nobody else steps the core."""

    def __init__(self, core: EngineCore, times: StepTimes, log: TokenLog, kept: KeptTokens) -> None:
        assert isinstance(core.executor, SimExecutor), "tokens must be known before their steps are computed"
        self._core = core
        self._executor = core.executor
        self._times = times
        self._log = log
        self._kept = kept
        self._members: dict[Sequence, _Member] = {}
        self._batch: list[Sequence] = []
        """The running sequences as they were when last looked at."""
        self._due: list[tuple[int, int, _Member]] = []
        """(boundary, place in line, member); entries of members that have left, or are due at another boundary by now,
        are skipped."""
        self._needy: list[_Member] = []
        """Those that need a page for the next step."""
        self._segment: _Segment | None = None
        self._longest_s: list[float] = []
        """Of each segment that is over: its longest step."""
        self._boundary = 0
        self._now_s = 0.0
        self._samples: list[StepSample] = []
        self.num_steps = 0
        self.busy_s = 0.0

    @property
    def is_active(self) -> bool:
        """Whether the batch is in here."""
        return self._segment is not None

    def num_tokens_behind(self, now_s: float) -> int:
        """Return how many tokens the members' sequences lack, together."""
        if self._segment is None:
            return 0
        boundary, _ends_s = self._last_boundary(now_s)
        return sum(boundary - member.since for member in self._members.values())

    # ── entering and leaving ────────────────────────────────────────────────────────────────────────────────────────

    def drain_samples(self) -> tuple[StepSample, ...]:
        """Return how long steps took since the last call, one sample of each composition of the batch."""
        samples, self._samples = tuple(self._samples), []
        return samples

    def enter(self, now_s: float) -> bool:
        """Take over the running batch between two steps, if it only decodes; else change nothing.

        Sequences that wait must have been looked at, in vain, since anything has changed.
        """
        running = self._core.scheduler.running
        if not running or not all(map(_can_join, running)):
            return False
        self._boundary, self._now_s = 0, now_s
        self._core.stop_timing()
        return self._regroup()

    def leave(self) -> None:
        """Bring every sequence up to date and give the batch back. At a boundary that has been completed."""
        self._close_segment()
        for member in self._members.values():
            self._catch_up(member)
        self._members, self._batch, self._due, self._needy, self._longest_s = {}, [], [], [], []

    def break_off(self, now_s: float) -> None:
        """Do so at any time: the step that runs is lost."""
        self.complete(*self._last_boundary(now_s))
        self.leave()

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_due(self) -> tuple[int, float]:
        """Return the boundary at which something happens by itself, and its time."""
        assert self._segment is not None, "nothing runs"
        while not self._is_valid(self._due[0]):
            heapq.heappop(self._due)
        boundary = self._due[0][0]
        return boundary, self._segment.end_s(boundary)

    def next_boundary(self, now_s: float) -> tuple[int, float]:
        """Return the end of the step that runs now, and its time: that is when commands run."""
        assert self._segment is not None, "nothing runs"
        boundary = max(self._segment.first_boundary_at(now_s), self._boundary + 1)
        return boundary, self._segment.end_s(boundary)

    def _last_boundary(self, now_s: float) -> tuple[int, float]:
        """Return the latest boundary that has been reached, and its time."""
        assert self._segment is not None, "nothing runs"
        boundary, ends_s = self.next_boundary(now_s)
        return (boundary, ends_s) if ends_s <= now_s else (boundary - 1, self._segment.end_s(boundary - 1))

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def complete(self, boundary: int, now_s: float) -> Emitted:
        """All steps up to a boundary are over; nothing was due before it. Returns the events of what happens at it."""
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
                group = self._core.group_of(sequence)
                self._core.end(sequence)
                emitted.append((group, self._kept.flush(group, reason)))
        return emitted

    def go_on(self) -> bool:
        """Prepare the next step, at a boundary that has been completed and whose commands have run.

        False: it is none that can be taken here. The batch has been given back then.
        """
        scheduler = self._core.scheduler
        come = []
        if scheduler.running != self._batch:
            come = [sequence for sequence in scheduler.running if sequence not in self._members]
        if scheduler.waiting or not scheduler.running or not all(map(_can_join, come)):
            self.leave()
            return False
        if scheduler.running != self._batch:
            return self._regroup()
        return self._take_pages()

    def _regroup(self) -> bool:
        """Begin a segment with the sequences that run now."""
        running, members = self._core.scheduler.running, self._members
        context = 0 if self._segment is None else self._segment.context_at(self._boundary)
        self._close_segment()
        for member in [m for m in members.values() if m.sequence.state is not SequenceState.RUNNING]:
            del members[member.sequence]
            context -= member.num_context_tokens + self._boundary - member.since
        come = [sequence for sequence in running if sequence not in members]
        context += sum(sequence.num_tokens for sequence in come)
        constant_s, per_context_token_s = self._times.decode_line(len(running))
        self._segment = _Segment(
            start=self._boundary,
            start_s=self._now_s,
            constant_s=constant_s,
            per_context_token_s=per_context_token_s,
            num_sequences=len(running),
            num_joined=len(come),
            num_context_tokens=context,
        )
        first_s = self._segment.end_s(self._boundary + 1)
        for sequence in come:
            self._join(sequence, first_s)
        self._batch = running[:]
        return self._take_pages()

    def _join(self, sequence: Sequence, first_s: float) -> None:
        member = _Member(
            sequence=sequence,
            answer=self._executor.answer(sequence),
            since=self._boundary,
            num_context_tokens=sequence.num_tokens,
            first_gap_s=first_s - self._log.last_s(sequence.request.request_id, default_s=self._now_s),
            first_segment=len(self._longest_s),
        )
        self._members[sequence] = member
        self._plan(member)

    def _plan(self, member: _Member) -> None:
        """Find out when something happens to an up-to-date member next."""
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

    def _take_pages(self) -> bool:
        """Take the pages that the next step needs. False, and the batch is given back, when there are too few."""
        needy, self._needy = sorted(self._needy, key=lambda member: member.sequence.order), []
        for member in needy:
            if member.sequence.state is not SequenceState.RUNNING:
                continue
            if not self._core.scheduler.make_writable(member.sequence):
                self.leave()
                return False
            self._plan(member)
        return True

    def _catch_up(self, member: _Member) -> None:
        """Apply to a sequence the steps that it has taken since it was up to date."""
        num_steps = self._boundary - member.since
        sequence = member.sequence
        if num_steps == 0 or sequence.state is not SequenceState.RUNNING:
            return
        start = sequence.num_output_tokens
        token_ids = member.answer.run(start, start + num_steps)
        self._core.scheduler.advance(sequence, token_ids)
        self._kept.extend(self._core.group_of(sequence), start, token_ids)
        longest_s = max(self._longest_s[member.first_segment :], default=0.0)
        if self._segment is not None and self._boundary > self._segment.start:
            longest_s = max(longest_s, self._segment.step_s(self._boundary))
        if member.first_gap_s:
            self._log.count_gaps(member.first_gap_s, 1)
            longest_s = max(longest_s, member.first_gap_s)
        self._log.note_run(sequence.request.request_id, start + num_steps, self._now_s, longest_s)
        member.since, member.first_gap_s = self._boundary, 0.0
        member.first_segment = len(self._longest_s)
        member.num_context_tokens += num_steps

    def _close_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None or segment.start == self._boundary:
            return
        num_steps = self._boundary - segment.start
        first_s, last_s = segment.step_s(segment.start + 1), segment.step_s(self._boundary)
        self._longest_s.append(last_s)
        # The first gaps of those that have joined are longer, and counted apart.
        self._log.count_rising_gaps(first_s, last_s, num_steps * segment.num_sequences - segment.num_joined)
        self.num_steps += num_steps
        self.busy_s += self._now_s - segment.start_s
        shape = StepShape(
            num_decodes=segment.num_sequences,
            num_context_tokens=(segment.context_at(segment.start) + segment.context_at(self._boundary - 1)) // 2,
        )
        self._samples.append(StepSample(shape=shape, seconds=(self._now_s - segment.start_s) / num_steps))

    def _is_valid(self, entry: tuple[int, int, _Member]) -> bool:
        member = entry[2]
        return member.due == entry[0] and self._members.get(member.sequence) is member


def _can_join(sequence: Sequence) -> bool:
    """Whether a sequence's next step is to decode a token that nobody reads before the answer is complete."""
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
