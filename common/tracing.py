"""Traces: which spans one request made, on a router and on workers, in the terms of OpenTelemetry.

No code opens and closes spans. Work stamps its stages as it runs (`Stages`, and the life cycle of a request), and what
has ended becomes spans all at once. A span is recorded only for a request whose door chose to sample it, so work that
is not sampled costs a comparison, and a process without `tracing.endpoint` never imports OpenTelemetry
(`common/otlp.py` does).

A span never holds text: no prompt, no output, no token. Ids of clients are labels of logs, so they are left out too.
"""

import asyncio
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from common.clock import Clock

TRACEPARENT = "traceparent"
"""Header and metadatum of W3C Trace Context."""
MAX_STAGES = 128
"""Stages of one piece of work; the last one takes what comes beyond: prompts have no fixed number of chunks."""

Value: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[float]
Attributes: TypeAlias = Mapping[str, Value]

# Versions after 00 may append fields; ff is not a version. Ids of zeros are invalid.
_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_random = random.Random()  # ids need to differ, not to be secret
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_random.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanContext:
    """A span's place: its trace and itself."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""
    is_sampled: bool = True

    @classmethod
    def root(cls) -> "SpanContext":
        """Return the place of the first span of a new trace."""
        return cls(trace_id=_random.getrandbits(128) or 1, span_id=_random.getrandbits(64) or 1)

    def child(self) -> "SpanContext":
        """Return the place of a new span of the same trace, which is sampled."""
        return SpanContext(trace_id=self.trace_id, span_id=_random.getrandbits(64) or 1)

    @property
    def traceparent(self) -> str:
        """The place as W3C Trace Context writes it."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def parse_traceparent(text: str) -> SpanContext | None:
    """Return the place that a `traceparent` names; None for an invalid text, which the standard says to ignore."""
    found = _FORM.fullmatch(text.strip())
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    is_sampled = bool(int(found[4], 16) & _SAMPLED)
    return SpanContext(trace_id=int(found[2], 16), span_id=int(found[3], 16), is_sampled=is_sampled)


def traceparent_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the `traceparent` of a call's metadata; empty without one."""
    found = next((value for name, value in metadata or () if name == TRACEPARENT), "")
    return found if isinstance(found, str) else found.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at one moment of a span."""

    name: str
    at_s: float
    """Time on the clock of the process, like all times here."""
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of work that has ended."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[Event] = ()
    links: Sequence[SpanContext] = ()
    """Spans that led to this one and are not its parents."""
    error: str = ""
    """Class of the error that ended it."""
    is_server: bool = False
    """Whether it answers a call of another process."""


class Tracer(Protocol):
    """Takes the spans of a process. Neither method raises, and `record` never waits."""

    def record(self, spans: Sequence[Span]) -> None:
        """Take spans for export; they are dropped when too many wait."""
        ...

    def close(self) -> None:
        """Export what waits, for at most a few seconds. Blocks: do not call on the event loop."""
        ...


class NoTracer:
    """Takes nothing."""

    def record(self, spans: Sequence[Span]) -> None:
        """Drop the spans."""

    def close(self) -> None:
        """Do nothing."""


NO_TRACER: Tracer = NoTracer()


class Stages:
    """Stamps the stages of one piece of work, each of which ends when the next one begins; the base drops them."""

    def enter(self, name: str, *, after_s: float = 0.0, **attributes: Value) -> None:
        """Begin a stage, `after_s` seconds behind the beginning of the present one or, with 0, now.

        Attributes are named `kvrelay.…` in the span.
        """

    def note(self, **attributes: Value) -> None:
        """Add attributes to the present stage."""


NO_STAGES = Stages()


@dataclass(slots=True)
class _Stage:
    name: str
    start_s: float
    attributes: dict[str, Value]


class StampedStages(Stages):
    """Stages of work that is sampled."""

    def __init__(self, clock: Clock, *, begun_s: float | None = None) -> None:
        self._clock = clock
        self._begun_s = clock.monotonic() if begun_s is None else begun_s
        self._stages: list[_Stage] = []

    @property
    def entered_s(self) -> float:
        """Beginning of the present stage."""
        return self._stages[-1].start_s if self._stages else self._begun_s

    def enter(self, name: str, *, after_s: float = 0.0, **attributes: Value) -> None:
        """Begin a stage as `Stages.enter` does."""
        now_s = self._clock.monotonic()
        if len(self._stages) == MAX_STAGES:
            self.note(**attributes)
            return
        if after_s:
            now_s = min(now_s, self.entered_s + after_s)
        self._stages.append(_Stage(name, self._begun_s if not self._stages else now_s, named(attributes)))

    def note(self, **attributes: Value) -> None:
        """Add attributes to the present stage."""
        if self._stages:
            self._stages[-1].attributes.update(named(attributes))

    def spans(self, parent: SpanContext, end_s: float) -> Iterator[Span]:
        """Yield a span for each stage, the last of which ends at `end_s`; none for work that ended before its first."""
        ends = [*(stage.start_s for stage in self._stages[1:]), end_s]
        for stage, until_s in zip(self._stages, ends, strict=False):
            yield Span(
                name=stage.name,
                context=parent.child(),
                parent=parent,
                start_s=stage.start_s,
                end_s=until_s,
                attributes=stage.attributes,
            )


def named(attributes: Attributes) -> dict[str, Value]:
    """Return attributes under this project's names, which no convention of others takes."""
    return {f"kvrelay.{name}": value for name, value in attributes.items()}


@contextmanager
def tracing_call(tracer: Tracer, clock: Clock, traceparent: str, name: str, **attributes: Value) -> Iterator[Stages]:
    """Record the work of the block as a span below `traceparent`, with its stages below it, unless that is empty."""
    parent = parse_traceparent(traceparent) if traceparent and tracer is not NO_TRACER else None
    if parent is None or not parent.is_sampled:
        yield NO_STAGES
        return
    start_s, error = clock.monotonic(), ""
    stages = StampedStages(clock, begun_s=start_s)
    try:
        yield stages
    except asyncio.CancelledError:
        error = "Cancelled"
        raise
    except BaseException as caught:
        error = type(caught).__name__
        raise
    finally:
        context, end_s = parent.child(), clock.monotonic()
        call = Span(
            name=name,
            context=context,
            parent=parent,
            start_s=start_s,
            end_s=end_s,
            attributes=named(attributes),
            error=error,
            is_server=True,
        )
        tracer.record([call, *stages.spans(context, end_s)])
