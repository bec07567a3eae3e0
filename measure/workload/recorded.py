"""Recorded sessions as a source of a workload: shortened, sped up, and numbered."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from measure.workload.arrivals import arrival_times
from measure.workload.drawing import Drawing, Sort
from measure.workload.playing import cut_segment
from measure.workload.session_files import read_sessions
from measure.workload.session_traces import RecordedSession
from measure.workload.sessions import Beginning, Segment, Session, Turn
from measure.workload.spec import RecordedSpec, RecordedStreamSpec, WorkloadError

_MAX_TURNS = 1 << 20


class Recorded:
    """Sessions of a file, in its order."""

    def __init__(self, spec: RecordedStreamSpec) -> None:
        """Raises TraceError, WorkloadError, OSError."""
        self.name = spec.name
        self.concurrency = spec.concurrency
        self._spec = spec
        self._recorded = chosen_sessions(spec.sessions)
        if not self._recorded:
            raise WorkloadError(
                f"{spec.sessions.path}: has no sessions that are short enough; raise longest, or lower skip"
            )
        self._num_turns = sum(len(session.turns) for session in self._recorded)

    def request_rate(self, duration_s: float | None) -> float:
        """Return the rate of sessions times their mean number of requests; 0 in a closed loop."""
        if self._spec.arrivals is None:
            return 0.0
        rate = self._spec.arrivals.profile.mean_rate(duration_s)
        return rate * self._num_turns / len(self._recorded)

    def last_start_s(self, speed: float) -> float:
        """Return when the last session may begin, since they end."""
        return math.inf

    def sessions(self, drawing: Drawing) -> Iterator[Session]:
        """Yield the sessions until the drawing's limits."""
        num_requests = 0
        for number, (recorded, start_s) in enumerate(zip(self._recorded, self._starts(drawing), strict=False)):
            if start_s > drawing.duration_s or num_requests >= drawing.max_requests:
                return
            num_requests += len(recorded.turns)
            turns = _numbered(recorded, number, drawing, shares_tools=self._spec.sessions.shares_tools)
            yield Session(index=drawing.index(number), kind=self.name, start_s=start_s, turns=turns)

    def _starts(self, drawing: Drawing) -> Iterator[float]:
        arrivals = self._spec.arrivals
        if arrivals is None:
            places = drawing.concurrency or 1
            return itertools.chain((self._spec.ramp_s * each / places for each in range(places)), itertools.repeat(0.0))
        random = drawing.random(self.name, "arrivals")
        return arrival_times(arrivals.profile.scaled(drawing.speed), arrivals.shape, random)


@lru_cache(maxsize=1)
def chosen_sessions(spec: RecordedSpec) -> tuple[RecordedSession, ...]:
    """Return the sessions that are replayed, as they are. Raises TraceError, OSError."""
    sessions = (_first_turns(each, spec.turns) for each in itertools.islice(read_sessions(spec.path), spec.skip, None))
    short = (each for each in sessions if spec.longest is None or _longest(each.turns) <= spec.longest)
    shrunk = (shrunk_session(session, spec.shrink) for session in itertools.islice(short, spec.limit))
    return tuple(replace(each, turns=tuple(_sped_up(turn, spec) for turn in each.turns)) for each in shrunk)


def _longest(turns: Sequence[Turn]) -> int:
    lengths = Session(index=0, kind="", start_s=0.0, turns=tuple(turns)).prompt_lengths()
    return max(length + turn.num_output_tokens for length, turn in zip(lengths, turns, strict=True))


def _first_turns(session: RecordedSession, num_turns: int | None) -> RecordedSession:
    return session if num_turns is None else replace(session, turns=session.turns[:num_turns])


def _sped_up(turn: Turn, spec: RecordedSpec) -> Turn:
    longest_s = math.inf if spec.max_pause_s is None else spec.max_pause_s
    return replace(turn, think_s=min(turn.think_s / spec.speed, longest_s))


def shrunk_session(session: RecordedSession, factor: int) -> RecordedSession:
    """Return a session with all lengths divided and rounded down, to at least one token; shared parts stay shared."""
    if factor == 1:
        return session
    turns: list[Turn] = []
    ends: list[int] = []
    lengths = Session(index=0, kind="", start_s=0.0, turns=session.turns).prompt_lengths()
    for length, turn in zip(lengths, session.turns, strict=True):
        assert turn.beginning is not None, "recorded turns have one"
        kept = turn.beginning
        whole = kept.num_tokens == lengths[kept.turn] + session.turns[kept.turn].num_output_tokens
        num_kept = ends[kept.turn] if whole and kept.num_tokens else kept.num_tokens // factor
        segments = [cut_segment(each, each.num_tokens // factor) for each in turn.segments]
        own = max(1, length // factor - num_kept - sum(each.num_tokens for each in segments[:-1]))
        segments[-1] = cut_segment(segments[-1], own)
        num_output = max(1, turn.num_output_tokens // factor)
        ends.append(num_kept + sum(each.num_tokens for each in segments) + num_output)
        turns.append(
            replace(
                turn,
                segments=tuple(each for each in segments if each.num_tokens),
                num_output_tokens=num_output,
                beginning=Beginning(kept.turn, num_kept),
            )
        )
    return replace(
        session,
        num_tool_tokens=session.num_tool_tokens // factor,
        num_system_tokens=session.num_system_tokens // factor,
        turns=tuple(turns),
    )


def _numbered(recorded: RecordedSession, number: int, drawing: Drawing, *, shares_tools: bool) -> tuple[Turn, ...]:
    """Return the turns with contents that no other session has, but for shared tools."""

    def own(segment: Segment) -> Segment:
        return Segment(drawing.content(Sort.OWN, number * _MAX_TURNS + segment.content), segment.num_tokens)

    turns = [replace(turn, segments=tuple(map(own, turn.segments))) for turn in recorded.turns]
    tools, system = recorded.num_tool_tokens, recorded.num_system_tokens
    first = turns[0].segments[0]
    if shares_tools and 0 < tools + system < first.num_tokens:
        shared = (
            Segment(drawing.content(Sort.PREFIX, tools), tools),
            Segment(drawing.content(Sort.PREFIX, (tools + 1) * _MAX_TURNS + system), system),
            Segment(first.content, first.num_tokens - tools - system),
        )
        segments = (*(each for each in shared if each.num_tokens), *turns[0].segments[1:])
        turns[0] = replace(turns[0], segments=segments)
    return tuple(turns)
