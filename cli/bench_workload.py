"""The workload that the options of `kvrelay bench run` describe."""

import enum
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.errors import CliError

if TYPE_CHECKING:
    from measure.workload.spec import WorkloadSpec

DEFAULT_RATE = 1.0
DEFAULT_DURATION_S = 60.0
DEFAULT_PROMPT_TOKENS = "lognormal:200,0.7,max=1500"
DEFAULT_OUTPUT_TOKENS = "lognormal:60,0.6,max=200"
DEFAULT_TURN_TOKENS = "lognormal:40,0.6,max=200"
DEFAULT_THINK_S = "exponential:5"
_STREAM = "load"


class Arrivals(enum.StrEnum):
    """How sessions arrive in an open loop."""

    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"


class ContentKind(enum.StrEnum):
    """Content of the prompts."""

    TOKENS = "tokens"
    TEXT = "text"
    CHAT = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Options that describe sessions; None where the option is not given."""

    rate: float | None = None
    arrivals: Arrivals | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    turns: str | None = None
    turn_tokens: str | None = None
    think: str | None = None
    prefix_share: float | None = None
    prefix_tokens: str | None = None
    prefix_count: int | None = None

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        return [_flag(field.name) for field in fields(self) if getattr(self, field.name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Options that replay a trace."""

    trace: Path | None = None
    speed: float | None = None
    shrink: int | None = None
    limit: int | None = None

    @property
    def given(self) -> list[str]:
        """The options that were given, but for the trace itself."""
        return [_flag(name) for name in ("speed", "shrink", "limit") if getattr(self, name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Options that hold for every workload, whatever its file says."""

    duration: float | None = None
    requests: int | None = None
    content: ContentKind | None = None
    seed: int | None = None


def workload_spec(file: Path | None, shape: Shape, replay: Replay, limits: Limits) -> "WorkloadSpec":
    """Return what a file, or a trace, or options describe. Raises CliError, WorkloadError."""
    if file is not None and replay.trace is not None:
        raise CliError("--workload and --trace exclude each other")
    if replay.trace is None and replay.given:
        raise CliError(f"{replay.given[0]} is for a trace: give --trace FILE, or set it in the workload's file")
    if shape.given and (file is not None or replay.trace is not None):
        source = "--workload" if file is not None else "--trace"
        raise CliError(f"{shape.given[0]} and {source} exclude each other; --load R scales arrivals to R requests/s")
    if file is not None:
        return _from_file(file, limits)
    return _parsed(_trace_stream(replay) if replay.trace is not None else _session_stream(shape), shape, replay, limits)


def _from_file(file: Path, limits: Limits) -> "WorkloadSpec":
    from measure.workload.spec import load_workload

    return load_workload(file, changes=_limits(limits))


def _trace_stream(replay: Replay) -> dict[str, Any]:
    assert replay.trace is not None
    trace = {"path": replay.trace, "speed": replay.speed, "shrink": replay.shrink, "limit": replay.limit}
    return {"trace": _without_none(trace)}


def _session_stream(shape: Shape) -> dict[str, Any]:
    if shape.concurrency is not None:
        for name in ("rate", "arrivals", "burstiness"):
            if getattr(shape, name) is not None:
                raise CliError(f"{_flag(name)} is for an open loop, --concurrency for a closed one: give one of them")
    if shape.prefix_tokens is None and (shape.prefix_share is not None or shape.prefix_count is not None):
        raise CliError("--prefix-share and --prefix-count need --prefix-tokens, the length of a shared prefix")
    arrivals = {
        "rate": DEFAULT_RATE if shape.rate is None else shape.rate,
        "process": (shape.arrivals or (Arrivals.GAMMA if shape.burstiness is not None else Arrivals.POISSON)).value,
        "burstiness": shape.burstiness,
    }
    prefix = {"share": shape.prefix_share, "tokens": shape.prefix_tokens, "count": shape.prefix_count}
    stream = {
        "arrivals": _without_none(arrivals) if shape.concurrency is None else None,
        "concurrency": shape.concurrency,
        "turns": shape.turns,
        "first_tokens": shape.prompt_tokens or DEFAULT_PROMPT_TOKENS,
        "output_tokens": shape.output_tokens or DEFAULT_OUTPUT_TOKENS,
        "prefix": _without_none(prefix) or None,
    }
    if shape.turns is not None:
        stream["turn_tokens"] = shape.turn_tokens or DEFAULT_TURN_TOKENS
        stream["think_s"] = shape.think or DEFAULT_THINK_S
    elif shape.turn_tokens is not None or shape.think is not None:
        raise CliError("--turn-tokens and --think are for sessions of several turns: give --turns")
    return _without_none(stream)


def _parsed(stream: dict[str, Any], shape: Shape, replay: Replay, limits: Limits) -> "WorkloadSpec":
    from measure.workload.spec import WorkloadError, parse_workload

    duration_s = limits.duration
    if duration_s is None and limits.requests is None and replay.trace is None:
        duration_s = DEFAULT_DURATION_S
    name = replay.trace.stem if replay.trace is not None else _name(shape)
    raw = _limits(limits) | {"name": name, "duration_s": duration_s, "streams": [{"name": _STREAM} | stream]}
    try:
        return parse_workload(_without_none(raw), source="")
    except WorkloadError as error:
        raise CliError("\n".join(map(_by_option, str(error).splitlines()))) from None


def _limits(limits: Limits) -> dict[str, Any]:
    """Return the keys of a workload that are given."""
    return _without_none(
        {
            "content": None if limits.content is None else limits.content.value,
            "seed": limits.seed,
            "duration_s": limits.duration,
            "max_requests": limits.requests,
        }
    )


def _name(shape: Shape) -> str:
    if shape.concurrency is not None:
        return f"concurrency-{shape.concurrency}"
    return f"rate-{DEFAULT_RATE if shape.rate is None else shape.rate:g}"


_OPTIONS = {
    "first_tokens": "--prompt-tokens",
    "output_tokens": "--output-tokens",
    "turns": "--turns",
    "turn_tokens": "--turn-tokens",
    "think_s": "--think",
    "arrivals.rate": "--rate",
    "arrivals.burstiness": "--burstiness",
    "arrivals": "--burstiness",
    "prefix.tokens": "--prefix-tokens",
}
"""Keys of a stream, and the options that set them."""


def _by_option(line: str) -> str:
    """Return a workload's complaint, with the option in place of the key."""
    key, _, reason = line.removeprefix(":").partition(":")
    return f"{_OPTIONS.get(key.removeprefix('streams.0.'), key)}:{reason}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _without_none(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}
