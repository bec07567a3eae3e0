"""Builds the workload of a specification: sessions from distributions, from a trace, or recorded.

Every session has its own random generator, seeded by the workload's seed, the stream's name and the session's number.
Its requests do not depend on its start, so the same sessions come at every load, and other streams do not change them.
Arrivals have another generator.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from measure.workload.arrivals import arrival_times
from measure.workload.drawing import Drawing, Sort
from measure.workload.recorded import Recorded
from measure.workload.sessions import Segment, Session, Stream, Turn, Workload
from measure.workload.spec import (
    MAX_PLACES,
    PrefixSpec,
    RecordedStreamSpec,
    SessionStreamSpec,
    StreamSpec,
    TraceStreamSpec,
    WorkloadError,
    WorkloadSpec,
)
from measure.workload.traces import read_trace
from measure.workload.waves import Day, in_stages, over_a_day, repeated

_MAX_TURNS = 1 << 20


class Synthetic:
    """Sessions of turns, drawn from distributions."""

    def __init__(self, spec: SessionStreamSpec) -> None:
        self.name = spec.name
        self.concurrency = spec.concurrency
        self._spec = spec

    def request_rate(self, duration_s: float | None) -> float:
        """Return the mean rate of the sessions times their mean number of turns; 0 in a closed loop."""
        if self._spec.arrivals is None:
            return 0.0
        return self._spec.arrivals.profile.mean_rate(duration_s) * self._spec.turns.mean_count

    def last_start_s(self, speed: float) -> float:
        """Return when the rate falls to 0 for good; infinity when it never does."""
        arrivals = self._spec.arrivals
        if arrivals is None or arrivals.profile.last_rate:
            return math.inf
        return arrivals.profile.changes_until_s

    def sessions(self, drawing: Drawing) -> Iterator[Session]:
        """Yield sessions until the drawing's limits."""
        prefixes = None if self._spec.prefix is None else _Prefixes(self._spec.prefix, self.name, drawing)
        num_requests = 0
        for number, start_s in enumerate(self._starts(drawing)):
            if start_s > drawing.duration_s or num_requests >= drawing.max_requests:
                return
            turns = self._turns(number, drawing, prefixes)
            num_requests += len(turns)
            yield Session(index=drawing.index(number), kind=self.name, start_s=start_s, turns=turns)

    def _starts(self, drawing: Drawing) -> Iterator[float]:
        arrivals = self._spec.arrivals
        if arrivals is None:
            return itertools.repeat(0.0)
        random = drawing.random(self.name, "arrivals")
        return arrival_times(arrivals.profile.scaled(drawing.speed), arrivals.shape, random)

    def _turns(self, number: int, drawing: Drawing, prefixes: "_Prefixes | None") -> tuple[Turn, ...]:
        spec, random = self._spec, drawing.random(self.name, "session", number)
        shared = () if prefixes is None else prefixes.draw(random)
        num_turns = min(spec.turns.draw_count(random), _MAX_TURNS)
        turns = []
        for position in range(num_turns):
            tokens = spec.first_tokens if position == 0 or spec.turn_tokens is None else spec.turn_tokens
            content = drawing.content(Sort.OWN, number * _MAX_TURNS + position)
            own = Segment(content, tokens.draw_count(random))
            turns.append(
                Turn(
                    segments=(own,) if position else (*shared, own),
                    num_output_tokens=spec.output_tokens.draw_count(random),
                    think_s=max(0.0, spec.think_s.draw(random)) if position else 0.0,
                )
            )
        return tuple(turns)


class _Prefixes:
    """Shared prefixes of a stream, and their popularity."""

    def __init__(self, spec: PrefixSpec, name: str, drawing: Drawing) -> None:
        self._share = spec.share
        random = drawing.random(name, "prefixes")
        self._segments = [
            Segment(drawing.content(Sort.PREFIX, rank), spec.tokens.draw_count(random)) for rank in range(spec.count)
        ]
        self._popularity = list(itertools.accumulate((rank + 1) ** -spec.zipf for rank in range(spec.count)))

    def draw(self, random: Random) -> tuple[Segment, ...]:
        """Return the beginning of a session: a prefix, or nothing."""
        has_one, which = random.random() < self._share, random.random() * self._popularity[-1]
        if not has_one:
            return ()
        rank = min(bisect.bisect_right(self._popularity, which), len(self._segments) - 1)
        return (self._segments[rank],)


class Replay:
    """The requests of a trace, each a session of one turn whose segments are the trace's blocks."""

    concurrency = None

    def __init__(self, spec: TraceStreamSpec) -> None:
        """Raises TraceError, OSError."""
        asked = spec.trace
        trace = read_trace(asked.path, block_size=asked.block_size).without_first(asked.skip)
        trace = trace if asked.limit is None else trace.first(asked.limit)
        trace = repeated(trace.shrunk(asked.shrink), asked.plays)
        trace = trace if asked.day_s is None else over_a_day(trace, Day(length_s=asked.day_s))
        self.name = spec.name
        self._trace = (in_stages(trace, asked.stages) if asked.stages else trace).faster(asked.speed)

    def request_rate(self, duration_s: float | None) -> float:
        """Return the mean rate over the whole trace."""
        return len(self._trace.requests) / self._trace.duration_s if self._trace.duration_s else math.inf

    def last_start_s(self, speed: float) -> float:
        """Return the arrival of the last request."""
        return self._trace.duration_s / speed

    def sessions(self, drawing: Drawing) -> Iterator[Session]:
        """Yield a session for each request that arrives within the drawing's limits."""
        counters: dict[int, int] = {}  # ids in a file may have any size
        for number, request in enumerate(self._trace.requests):
            start_s = request.arrival_s / drawing.speed
            if start_s > drawing.duration_s or number >= drawing.max_requests:
                return
            segments = tuple(
                Segment(
                    drawing.content(Sort.BLOCK, counters.setdefault(segment.content, len(counters))),
                    segment.num_tokens,
                )
                for segment in self._trace.segments(request)
            )
            turn = Turn(segments=segments, num_output_tokens=request.num_output_tokens)
            yield Session(index=drawing.index(number), kind=self.name, start_s=start_s, turns=(turn,))


SessionSource = Synthetic | Replay | Recorded


def build_workload(
    spec: WorkloadSpec, *, load: float | None = None, sessions: float | None = None, seed: int | None = None
) -> Workload:
    """Return the workload of a specification; its sessions are drawn during iteration, the same each time.

    `load` scales all open-loop arrivals, traces included, to a mean number of requests per second in total, later turns
    counted; `sessions` scales closed loops to so many sessions at any time in total. The sessions themselves are the
    same at every load. `seed` replaces that of the specification. Raises WorkloadError for a load that cannot be
    reached; TraceError, OSError for an unreadable trace.
    """
    sources = [_source(stream) for stream in spec.streams]
    speed = 1.0 if load is None else _speed(spec, sources, load)
    places_by = 1.0 if sessions is None else _places(spec, sources, sessions)
    seed = spec.seed if seed is None else seed
    streams = []
    for position, source in enumerate(sources):
        places = source.concurrency
        if places is not None:
            places = max(1, round(places * places_by))
        drawing = Drawing(
            seed=seed,
            position=position,
            num_streams=len(sources),
            speed=speed,
            duration_s=math.inf if spec.duration_s is None else spec.duration_s,
            max_requests=math.inf if spec.max_requests is None else spec.max_requests,
            concurrency=places,
        )
        streams.append(Stream(kind=source.name, sessions=_Sessions(source, drawing), concurrency=places))
    return Workload(
        name=spec.name,
        content=spec.content,
        streams=tuple(streams),
        duration_s=_duration_s(spec, sources, speed),
        seed=seed,
        max_requests=spec.max_requests,
    )


@dataclass(frozen=True, slots=True)
class _Sessions:
    """Draws the sessions of a source again for each iteration."""

    source: SessionSource
    drawing: Drawing

    def __iter__(self) -> Iterator[Session]:
        return self.source.sessions(self.drawing)


def _source(stream: StreamSpec) -> SessionSource:
    match stream:
        case TraceStreamSpec():
            return Replay(stream)
        case RecordedStreamSpec():
            return Recorded(stream)
    return Synthetic(stream)


def _request_rate(spec: WorkloadSpec, sources: list[SessionSource]) -> float:
    """Return the requests per second of all open-loop streams together, later turns counted; 0 without any.

    A changing rate counts with its mean over the run's duration or, without one, until it is constant; a trace counts
    with its mean, infinite when all requests come at once. Reads traces: raises TraceError, OSError.
    """
    return math.fsum(source.request_rate(spec.duration_s) for source in sources)


def _speed(spec: WorkloadSpec, sources: list[SessionSource], load: float) -> float:
    if not 0 < load < math.inf:
        raise WorkloadError(f"{spec.name}: a load must be a positive number of requests per second, not {load:g}")
    rate = _request_rate(spec, sources)
    if not 0 < rate < math.inf:
        what = "it has no open-loop arrivals" if rate == 0 else "all requests of its trace come at once"
        raise WorkloadError(f"{spec.name}: cannot be scaled to {load:g} requests/s: {what}")
    return load / rate


def _places(spec: WorkloadSpec, sources: list[SessionSource], sessions: float) -> float:
    """Return the factor on the closed loops' sessions."""
    total = sum(source.concurrency or 0 for source in sources)
    if not 1 <= sessions <= MAX_PLACES or not total:
        most = f"{MAX_PLACES:,}"
        raise WorkloadError(
            f"{spec.name}: cannot have {sessions:g} sessions at a time: say 1 to {most}, of closed loops"
        )
    return sessions / total


def _duration_s(spec: WorkloadSpec, sources: list[SessionSource], speed: float) -> float:
    if spec.duration_s is not None:
        return spec.duration_s
    return max(source.last_start_s(speed) for source in sources)
