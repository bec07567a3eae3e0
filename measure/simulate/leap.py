"""Decoding without planning every step of it.

What a decoding sequence does by itself is known beforehand, as long as its tokens are: in every step it computes one
token and samples the next one, until it ends, has filled a block, or needs a new page. So sequences that decode are
left alone until the first of these, and then only those that it happens to are brought up to date. Other work, prompts
above all, is planned beside them as ever (`engine.unplanned`).

    boundary     0 ──── 1 ──── 2 ──── 3 ──── 4 ──── …      numbered by the steps completed
    sequence A   joined ──────────────────▶ ends           due at 4
    sequence B          joined ──▶ block full              due at 3, then again

While nothing else is in the steps, none of them needs a turn of the loop: the end of the n-th next one is computed,
since its time is affine in the context (`StepTimes`), which grows by one token per sequence and step.

The outcome, in state, events and times, is that of the same steps planned one by one
(tests/measure/simulate/test_leap.py).
"""

import heapq
from collections import Counter
from dataclasses import dataclass

from common.timing import StepShape
from engine.core import Emitted, EngineCore
from engine.events import FinishReason, StepSample
from engine.group import Group
from engine.sequence import Sequence, SequenceState
from measure.simulate.bundle import KeptTokens
from measure.simulate.executor import EOS_TOKEN_ID, Answer, SimExecutor
from measure.simulate.segment import Segment
from measure.simulate.timing import StepTimes
from measure.simulate.token_log import TokenLog


@dataclass(slots=True, eq=False)
class _Member:
    """A decoding sequence, up to date as of boundary `since`."""

    sequence: Sequence
    group: Group
    kind: str
    """Of its request."""
    answer: Answer
    since: int
    num_context_tokens: int
    """That its next step reads, as of then."""
    first_segment: int
    """Index of the segment that it joined."""
    first_gap_s: float = 0.0
    """From its last token to the end of its first step here; 0 once that is noted."""
    due: int = -1
    """Boundary at which something happens to it."""


class DecodeLeap:
    """The decoding sequences of one engine. Between two steps: `complete`, `gather`, then `run` or `step`."""

    def __init__(self, core: EngineCore, times: StepTimes, log: TokenLog, kept: KeptTokens) -> None:
        assert isinstance(core.executor, SimExecutor), "tokens must be known before their steps are computed"
        self._core = core
        self._unplanned = core.unplanned
        self._executor = core.executor
        self._times = times
        self._log = log
        self._kept = kept
        self._members: dict[Sequence, _Member] = {}
        self._num_by_kind: Counter[str] = Counter()
        """Of the members."""
        self._running: list[Sequence] = []
        """What ran when it was last looked at, others included."""
        self._num_context_tokens = 0
        """That the members' next step reads."""
        self._newcomers: list[_Member] = []
        """Since the last segment began."""
        self._due: list[tuple[int, int, _Member]] = []
        """(boundary, place in line, member); entries of members that have left, or are due at another boundary by now,
        are skipped."""
        self._needy: list[_Member] = []
        """Those that need a page for the next step."""
        self._segment: Segment | None = None
        self._longest_s: list[float] = []
        """Of each segment that is over: its longest step."""
        self._boundary = 0
        self._now_s = 0.0
        self._samples: list[StepSample] = []
        self.num_steps = 0
        """Without other work in them, up to the last change."""
        self.busy_s = 0.0
        """Time of these."""

    @property
    def is_running(self) -> bool:
        """Whether steps are taken that hold nothing but decodes."""
        return self._segment is not None and self._segment.is_pure

    def num_tokens_behind(self, now_s: float) -> int:
        """Return how many tokens the members' sequences lack, together."""
        boundary = self._boundary
        if self.is_running:
            boundary, _ends_s = self._last_boundary(now_s)
        return sum(boundary - member.since for member in self._members.values())

    def busy_until(self, now_s: float) -> float:
        """Return the time of steps without other work up to now, the running one included."""
        segment = self._segment
        return self.busy_s + (now_s - segment.start_s if segment is not None and segment.is_pure else 0.0)

    def drain_samples(self) -> tuple[StepSample, ...]:
        """Return how long steps took since the last call, one sample of each composition of the batch."""
        samples, self._samples = tuple(self._samples), []
        return samples

    # ── between steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def gather(self, now_s: float) -> int:
        """Let sequences that decode now join, forget those that are gone, and take the pages that the next step needs.

        Returns the number of members. When pages run out it is 0: who is preempted is not decided here, so everybody is
        up to date and planned as ever in the next step.
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
        """Take steps with nothing but decodes in them, until `complete`; returns where something is due, and when."""
        if not self.is_running:
            constant_s, per_context_token_s = self._times.decode_line(len(self._members))
            self._open(constant_s, per_context_token_s, is_pure=True)
        return self._next_due()

    def step(self, seconds: float) -> None:
        """Take one step, which other work shares."""
        self._open(seconds, 0.0, is_pure=False)

    def leave(self) -> None:
        """Bring every sequence up to date and look after none. At a boundary that has been completed."""
        self._close_segment()
        for member in self._members.values():
            self._catch_up(member)
        self._members, self._running, self._due, self._longest_s = {}, [], [], []
        self._newcomers, self._needy, self._num_context_tokens = [], [], 0
        self._num_by_kind.clear()

    def break_off(self, now_s: float) -> None:
        """Do so at any time: the step that runs is lost."""
        if self.is_running:
            self.complete(*self._last_boundary(now_s))
        self.leave()

    def complete(self, boundary: int, now_s: float) -> Emitted:
        """All steps up to a boundary are over; nothing was due before it. Returns the events of what happens at it."""
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
        """The step that other work shared is over."""
        return self.complete(self._boundary + 1, now_s)

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_boundary(self, now_s: float) -> tuple[int, float]:
        """Return the end of the step that runs now, and its time: that is when commands run. While `is_running`."""
        assert self._segment is not None, "nothing runs"
        boundary = max(self._segment.first_boundary_at(now_s), self._boundary + 1)
        return boundary, self._segment.end_s(boundary)

    def _last_boundary(self, now_s: float) -> tuple[int, float]:
        """Return the latest boundary that has been reached, and its time."""
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
        segment = self._segment = Segment(
            start=self._boundary,
            start_s=self._now_s,
            constant_s=constant_s,
            per_context_token_s=per_context_token_s,
            num_sequences=len(self._members),
            num_joined=Counter(member.kind for member in self._newcomers),
            num_members={kind: count for kind, count in self._num_by_kind.items() if count},
            num_context_tokens=self._num_context_tokens,
            is_pure=is_pure,
        )
        first_s = segment.end_s(self._boundary + 1)
        for member in self._newcomers:
            last_s = self._log.last_s(member.sequence.request.request_id, default_s=self._now_s)
            member.first_gap_s = first_s - last_s
        self._newcomers = []

    def _close_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None or segment.start == self._boundary:
            return
        num_steps = self._boundary - segment.start
        first_s, last_s = segment.step_s(segment.start + 1), segment.step_s(self._boundary)
        self._longest_s.append(last_s)
        # The first gaps of those that have joined are longer, and counted apart.
        for kind, num_members in segment.num_members.items():
            num_gaps = num_steps * num_members - segment.num_joined[kind]
            self._log.count_rising_gaps(kind, first_s, last_s, num_gaps)
        if not segment.is_pure:
            return  # the engine counts it
        self.num_steps += num_steps
        self.busy_s += self._now_s - segment.start_s
        shape = StepShape(
            num_decodes=segment.num_sequences,
            num_context_tokens=(segment.context_at(segment.start) + segment.context_at(self._boundary - 1)) // 2,
        )
        self._samples.append(StepSample(shape=shape, seconds=(self._now_s - segment.start_s) / num_steps))

    # ── members ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _regroup(self) -> None:
        """Let the members be the sequences that decode now."""
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
            self._num_by_kind[member.kind] -= 1
            self._num_context_tokens -= member.num_context_tokens + self._boundary - member.since
        for sequence in come:
            self._join(sequence)

    def _join(self, sequence: Sequence) -> None:
        member = _Member(
            sequence=sequence,
            group=self._unplanned.group_of(sequence),
            kind=self._log.kind(sequence.request.request_id),
            answer=self._executor.answer(sequence),
            since=self._boundary,
            num_context_tokens=sequence.num_tokens,
            first_segment=len(self._longest_s),
        )
        self._members[sequence] = member
        self._num_by_kind[member.kind] += 1
        self._num_context_tokens += sequence.num_tokens
        self._newcomers.append(member)
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

    def _catch_up(self, member: _Member) -> None:
        """Apply to a sequence the steps that it has taken since it was up to date."""
        num_steps = self._boundary - member.since
        sequence = member.sequence
        if num_steps == 0 or sequence.state is not SequenceState.RUNNING:
            return
        start = sequence.num_output_tokens
        token_ids = member.answer.run(start, start + num_steps)
        self._unplanned.advance(sequence, token_ids)
        self._kept.extend(member.group, start, token_ids)
        longest_s = max(self._longest_s[member.first_segment :], default=0.0)
        if self._segment is not None and self._boundary > self._segment.start:
            longest_s = max(longest_s, self._segment.step_s(self._boundary))
        if member.first_gap_s:
            self._log.count_gaps(member.kind, member.first_gap_s, 1)
            longest_s = max(longest_s, member.first_gap_s)
        self._log.note_run(sequence.request.request_id, start + num_steps, self._now_s, longest_s)
        member.since, member.first_gap_s = self._boundary, 0.0
        member.first_segment = len(self._longest_s)
        member.num_context_tokens += num_steps

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
