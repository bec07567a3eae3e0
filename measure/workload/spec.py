"""Specifications of workloads, from YAML or command-line options; docs/loadtest.md lists the keys.

Every problem is reported as `file:key: reason`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from measure.workload.arrivals import Process, RateProfile
from measure.workload.lengths import Count, Distribution, Seconds
from measure.workload.sessions import Content

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Point = tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], Rate]
"""(second since the run began, sessions per second)"""


def _rate_tag(raw: Any) -> str:
    return "<points>" if isinstance(raw, list | tuple) else "<number>"


RateOrPoints = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False), Tag("<number>")] | Annotated[tuple[Point, ...], Tag("<points>")],
    Discriminator(_rate_tag),
]

_ONE = Distribution("constant", (1.0,))
_ZERO = Distribution("constant", (0.0,))


MAX_PLACES = 1_000_000
"""Sessions at a time of a closed loop."""


class WorkloadError(Exception):
    """A workload cannot be used; the message names file, key and reason."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ArrivalsSpec(_Section):
    """An open loop: sessions begin whether or not others have been answered."""

    rate: RateOrPoints | None = None
    """Sessions per second; or points [second, rate], with linear interpolation."""
    steps: tuple[Point, ...] | None = None
    """Alternative to `rate`: points [second, rate] at which the rate jumps."""
    process: Process = Process.POISSON
    burstiness: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Shape of a gamma process: 1 is Poisson, below 1 burstier, above 1 more even. The squared coefficient of variation
    of its intervals is 1 / burstiness."""

    @property
    def profile(self) -> RateProfile:
        """The rate as a function of time."""
        if self.steps is not None:
            return RateProfile.steps(self.steps)
        assert self.rate is not None, "checked when it was read"
        return RateProfile(self.rate if isinstance(self.rate, tuple) else ((0.0, self.rate),))

    @property
    def shape(self) -> float:
        """Shape of the intervals' gamma distribution, for `measure.workload.arrivals`."""
        match self.process:
            case Process.POISSON:
                return 1.0
            case Process.GAMMA:
                return self.burstiness
            case Process.CONSTANT:
                return math.inf

    @model_validator(mode="after")
    def _check(self) -> "ArrivalsSpec":
        if (self.rate is None) == (self.steps is None):
            raise ValueError("must have one of rate and steps")
        if self.process is not Process.GAMMA and self.burstiness != 1.0:
            raise ValueError(f"burstiness: {self.burstiness:g} is for process: gamma, not {self.process}")
        points = self.steps if self.steps is not None else self.rate
        if isinstance(points, tuple):
            if not points:
                raise ValueError("there are no points")
            seconds = [second for second, _ in points]
            if seconds[0] != 0:
                raise ValueError(f"the first point is at second {seconds[0]:g}; it must be at 0")
            if sorted(set(seconds)) != seconds:
                raise ValueError("the points must be in order of time, each at a second of its own")
            if not any(rate for _, rate in points):
                raise ValueError("the rate is 0 at every point")
        return self


class PrefixSpec(_Section):
    """System prompts that sessions share."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the sessions that begin with one."""
    tokens: Count
    count: Annotated[int, Field(ge=1)] = 1
    zipf: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Exponent of popularity: the k-th prefix has weight k**-zipf; 0: equal weights."""


class SessionStreamSpec(_Section):
    """Sessions of turns, drawn from distributions."""

    name: Annotated[str, Field(min_length=1)]
    arrivals: ArrivalsSpec | None = None
    concurrency: Annotated[int, Field(ge=1, le=MAX_PLACES)] | None = None
    """A closed loop: number of sessions at any time."""
    turns: Count = _ONE
    think_s: Seconds = _ZERO
    """Time from the end of an answer to the next request."""
    prefix: PrefixSpec | None = None
    first_tokens: Count
    """Tokens that the first turn adds to the prefix."""
    turn_tokens: Count | None = None
    """Tokens that later turns add to the history."""
    output_tokens: Count

    @model_validator(mode="after")
    def _check(self) -> "SessionStreamSpec":
        if (self.arrivals is None) == (self.concurrency is None):
            raise ValueError("must have one of arrivals (open loop), concurrency (closed loop), trace and sessions")
        if self.turn_tokens is None and self.turns.most > 1:
            raise ValueError(f"turn_tokens: missing; with turns: {self.turns} sessions have later turns")
        return self


class TraceSpec(_Section):
    """A trace to replay."""

    path: Path
    """Mooncake (.jsonl), Azure (.csv), or a recording; relative to the file that names it."""
    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Divisor of the gaps between arrivals."""
    shrink: Annotated[int, Field(ge=1)] = 1
    """Divisor of prompts, answers and blocks; divides the block size."""
    skip: Annotated[int, Field(ge=0)] = 0
    """Number of requests at the beginning that are not replayed."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Number of requests to replay, from the first that is not skipped; default: all."""
    plays: Annotated[int, Field(ge=1)] = 1
    """Times that it is replayed, each time with other contents."""
    day_s: PositiveFloat | None = None
    """Length of a day over which the requests are spread, with a quiet night and busy hours; default: its own clock."""
    stages: tuple[tuple[PositiveFloat, PositiveFloat], ...] = ()
    """Stages [seconds, speed] of its clock, which follow each other again and again; empty: its own clock."""
    block_size: Annotated[int, Field(ge=1)] | None = None
    """Tokens per block id; default: as stated in the file, else 512."""


class TraceStreamSpec(_Section):
    """The requests of a trace, each a session of one turn."""

    name: Annotated[str, Field(min_length=1)]
    trace: TraceSpec


class RecordedSpec(_Section):
    """Recorded sessions to replay."""

    path: Path
    """A file or folder of sessions (docs/loadtest.md); relative to the file that names it."""
    shrink: Annotated[int, Field(ge=1)] = 1
    """Divisor of all lengths."""
    speed: PositiveFloat = 1.0
    """Divisor of the times that tools and persons take."""
    max_pause_s: Annotated[float, Field(ge=0)] | None = None
    """Longest of these times, after the division; default: as recorded."""
    skip: Annotated[int, Field(ge=0)] = 0
    """Number of sessions at the beginning that are not replayed."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Number of sessions to replay, of those that are short enough; default: all."""
    longest: Annotated[int, Field(ge=1)] | None = None
    """Sessions with a longer prompt or answer, in tokens of the recording, are left out."""
    turns: Annotated[int, Field(ge=1)] | None = None
    """Number of requests of a session, from its first; default: all."""
    shares_tools: bool = False
    """Whether sessions with the same tools and system prompts begin alike, as they do in production."""


class RecordedStreamSpec(_Section):
    """Recorded sessions, each a closed loop."""

    name: Annotated[str, Field(min_length=1)]
    sessions: RecordedSpec
    arrivals: ArrivalsSpec | None = None
    concurrency: Annotated[int, Field(ge=1, le=MAX_PLACES)] | None = None
    """A closed loop: number of sessions at any time, until all have been played."""
    ramp_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Time in which the first sessions of a closed loop begin, one after the other."""

    @model_validator(mode="after")
    def _check(self) -> "RecordedStreamSpec":
        if (self.arrivals is None) == (self.concurrency is None):
            raise ValueError("must have one of arrivals (open loop) and concurrency (closed loop)")
        return self


def _stream_tag(raw: Any) -> str:
    for key, tag, kind in (
        ("trace", "<trace>", TraceStreamSpec),
        ("sessions", "<recorded>", RecordedStreamSpec),
    ):
        if key in raw if isinstance(raw, Mapping) else isinstance(raw, kind):
            return tag
    return "<sessions>"


StreamSpec = Annotated[
    Annotated[SessionStreamSpec, Tag("<sessions>")]
    | Annotated[TraceStreamSpec, Tag("<trace>")]
    | Annotated[RecordedStreamSpec, Tag("<recorded>")],
    Discriminator(_stream_tag),
]


class WorkloadSpec(_Section):
    """All requests of one run."""

    name: Annotated[str, Field(min_length=1)] = "workload"
    content: Content = Content.TOKENS
    """Form of prompts: tokens (exact ids), text (words to be continued) or chat (words as messages)."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of arrivals, lengths and contents."""
    duration_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Time after which no session begins; default: until all streams end."""
    max_requests: Annotated[int, Field(ge=1)] | None = None
    """Number of requests after which no session begins."""
    streams: tuple[StreamSpec, ...]

    @model_validator(mode="after")
    def _check(self) -> "WorkloadSpec":
        if not self.streams:
            raise ValueError("streams: empty")
        names = [stream.name for stream in self.streams]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"streams: two are called {name!r}; results are grouped by name")
        if self.duration_s is None and self.max_requests is None:
            for stream in self.streams:
                if _is_endless(stream):
                    raise ValueError(f"never ends: stream {stream.name!r} goes on until duration_s or max_requests")
        return self


def _is_endless(stream: SessionStreamSpec | TraceStreamSpec | RecordedStreamSpec) -> bool:
    if not isinstance(stream, SessionStreamSpec):
        return False
    return stream.arrivals is None or stream.arrivals.profile.last_rate > 0


def read_yaml(path: Path, *, refusal: type[Exception]) -> Any:
    """Return the content of a YAML file. Raises `refusal` with the reason."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise refusal(f"{path}: not YAML: {error}") from error


def load_workload(path: Path, *, changes: Mapping[str, object] | None = None) -> WorkloadSpec:
    """Read and check the YAML file of a workload; `changes` replace top-level keys.

    Raises WorkloadError with one `file:key: reason` line per problem.
    """
    raw = read_yaml(path, refusal=WorkloadError)
    changed = {"name": path.stem} | raw | dict(changes or {}) if isinstance(raw, dict) else raw
    return parse_workload(changed, source=str(path), folder=path.parent)


def parse_workload(raw: object, *, source: str, folder: Path | None = None) -> WorkloadSpec:
    """Check a workload from YAML or options; trace paths are relative to `folder`. Raises WorkloadError."""
    if not isinstance(raw, dict):
        raise WorkloadError(f"{source}: must be a mapping of keys to values, not {_type_name(raw)}")
    try:
        spec = WorkloadSpec.model_validate(raw)
    except ValidationError as error:
        raise WorkloadError("\n".join(_line(source, dict(item)) for item in error.errors())) from error
    return spec if folder is None else _located(spec, folder)


def _located(spec: WorkloadSpec, folder: Path) -> WorkloadSpec:
    def located(stream: StreamSpec) -> StreamSpec:
        for key in ("trace", "sessions"):
            file = getattr(stream, key, None)
            if file is not None:
                return stream.model_copy(update={key: file.model_copy(update={"path": folder / file.path})})
        return stream

    return spec.model_copy(update={"streams": tuple(map(located, spec.streams))})


def _type_name(raw: object) -> str:
    return "nothing" if raw is None else f"a {type(raw).__name__}"


_REASONS = {
    "extra_forbidden": "unknown key",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
}


def _line(source: str, item: dict[str, object]) -> str:
    location = item["loc"]
    assert isinstance(location, tuple)
    key = ".".join(str(part) for part in location if not str(part).startswith("<"))  # tags of unions
    reason = _REASONS.get(str(item["type"]), str(item["msg"]).removeprefix("Value error, "))
    return f"{source}:{key}: {reason}" if key else f"{source}:{reason}"
