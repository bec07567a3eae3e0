"""Options of `kvrelay bench run` for the load, and the workload that they describe."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.errors import CliError
from measure.workload.arrivals import Process
from measure.workload.sessions import Content

if TYPE_CHECKING:
    from measure.workload.spec import WorkloadSpec

DEFAULT_RATE = 1.0
DEFAULT_DURATION_S = 60.0
DEFAULT_PROMPT_TOKENS = "lognormal:200,0.7,max=1500"
DEFAULT_OUTPUT_TOKENS = "lognormal:60,0.6,max=200"
DEFAULT_TURN_TOKENS = "lognormal:40,0.6,max=200"
DEFAULT_THINK_S = "exponential:5"
_STREAM = "load"


_load = partial(typer.Option, show_default=False, rich_help_panel="Load")
_request = partial(typer.Option, show_default=False, rich_help_panel="Requests")
_length = partial(_request, metavar="LENGTH")
_replay = partial(typer.Option, show_default=False, rich_help_panel="Replay")
_recorded = partial(typer.Option, show_default=False, rich_help_panel="Recorded sessions")
_LENGTHS = "300, uniform:20,60, normal:300,40, lognormal:MEDIAN,SIGMA, exponential:MEAN; then ,min= and ,max="


class _Options:
    """Options of which each is None where it is not given."""

    __slots__: tuple[str, ...] = ()

    @property
    def given(self) -> list[str]:
        """Flags of the options that are given."""
        return [_flag(name) for name in type(self).__slots__ if getattr(self, name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions(_Options):
    """Options that describe sessions."""

    rate: Annotated[
        float | None,
        _load("--rate", "-r", min=0.0001, help=f"Open loop: mean sessions per second; default: {DEFAULT_RATE:g}."),
    ] = None
    arrivals: Annotated[Process | None, _load("--arrivals", help="Default: poisson.")] = None
    burstiness: Annotated[
        float | None,
        _load("--burstiness", min=0.001, help="Gamma arrivals: 1 is Poisson, below burstier, above more even."),
    ] = None
    concurrency: Annotated[
        int | None,
        _load(
            "--concurrency",
            "-k",
            min=1,
            help="Closed loop: number of sessions at any time; the load follows the server.",
        ),
    ] = None
    prompt_tokens: Annotated[
        str | None, _length("--prompt-tokens", help=f"{_LENGTHS}. Default: {DEFAULT_PROMPT_TOKENS}.")
    ] = None
    output_tokens: Annotated[
        str | None, _length("--output-tokens", help=f"Exact length of answers. Default: {DEFAULT_OUTPUT_TOKENS}.")
    ] = None
    turns: Annotated[
        str | None, _length("--turns", help="Requests of a session, each with the whole conversation; default: 1.")
    ] = None
    turn_tokens: Annotated[
        str | None, _length("--turn-tokens", help=f"Tokens that later turns add. Default: {DEFAULT_TURN_TOKENS}.")
    ] = None
    think: Annotated[
        str | None,
        _request(
            "--think",
            metavar="SECONDS",
            help=f"Time from an answer to the next turn; may be a distribution. Default: {DEFAULT_THINK_S}.",
        ),
    ] = None
    prefix_tokens: Annotated[
        str | None, _length("--prefix-tokens", help="Length of a prefix that prompts share, such as a system prompt.")
    ] = None
    prefix_share: Annotated[
        float | None, _request("--prefix-share", min=0, max=1, help="Share of sessions with a prefix; default: 1.")
    ] = None
    prefix_count: Annotated[
        int | None, _request("--prefix-count", min=1, help="Number of different prefixes; default: 1.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(_Options):
    """Options that hold for every workload, whatever its file says."""

    load: Annotated[
        float | None,
        _load(
            "--load",
            min=0.0001,
            metavar="RATE",
            help="Scale all arrivals, including those of a file or trace, to this mean number of requests per second.",
        ),
    ] = None
    duration: Annotated[
        float | None,
        _load(
            "--duration",
            "-d",
            min=0.1,
            metavar="SECONDS",
            help=f"Time in which sessions begin; default: {DEFAULT_DURATION_S:g}, or as in the file or trace.",
        ),
    ] = None
    requests: Annotated[
        int | None, _load("--requests", "-n", min=1, help="Number of requests after which no session begins.")
    ] = None
    content: Annotated[
        Content | None,
        _request("--content", help="Content of prompts: exact token ids, words, or chat messages; default: tokens."),
    ] = None
    seed: Annotated[
        int | None,
        _request("--seed", min=0, help="Equal seeds give equal requests; a new seed finds caches cold. Default: 0."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplayOptions(_Options):
    """Options that replay a trace."""

    speed: Annotated[float | None, _replay("--speed", "-s", min=0.0001, help="Factor on the rate of arrivals.")] = None
    shrink: Annotated[int | None, _replay("--shrink", min=1, help="Divide all lengths by this.")] = None
    limit: Annotated[
        int | None, _replay("--limit", min=1, help="Number of requests, or sessions, from the beginning.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOptions(_Options):
    """Options that play recorded sessions."""

    ramp: Annotated[
        float | None,
        _recorded("--ramp", min=0, max=1e9, metavar="SECONDS", help="Time in which the first of --concurrency begin."),
    ] = None
    longest: Annotated[
        int | None, _recorded("--longest", min=1, metavar="TOKENS", help="Leave out sessions with a longer prompt.")
    ] = None
    max_pause: Annotated[
        float | None, _recorded("--max-pause", min=0, metavar="SECONDS", help="Longest time of a tool or a person.")
    ] = None
    share_tools: Annotated[
        bool | None,
        _recorded("--share-tools", help="Let sessions with equal tools and system prompts begin alike."),
    ] = None


WorkloadOption = Annotated[
    Path | None,
    _load(
        "--workload",
        "-w",
        metavar="FILE.yaml",
        help="A workload of several streams (docs/loadtest.md), in place of the options below.",
    ),
]
TraceOption = Annotated[
    Path | None,
    _replay(
        "--trace",
        "-t",
        metavar="FILE",
        help="Mooncake (.jsonl), Azure (.csv), a recording of `kvrelay bench record`, or recorded sessions.",
    ),
]


def workload_spec(
    file: Path | None,
    trace: Path | None,
    shape: SessionOptions,
    replay: TraceReplayOptions,
    recorded: RecordedOptions,
    limits: Limits,
) -> "WorkloadSpec":
    """Return the workload that a file, a trace or options describe. Raises CliError, WorkloadError, OSError."""
    if file is not None and trace is not None:
        raise CliError("cannot take both --workload and --trace: each is a whole workload; give one of them")
    if trace is None and replay.given:
        raise CliError(f"{replay.given[0]} is for a trace: give --trace FILE, or set it in the workload's file")
    if trace is not None and file is None and _has_sessions(trace):
        return _parsed(trace.stem.removesuffix(".jsonl"), _recorded_stream(trace, shape, replay, recorded), limits)
    if recorded.given:
        raise CliError(f"{recorded.given[0]} is for a trace of sessions: give one with --trace FILE")
    if shape.given and (file is not None or trace is not None):
        source = "--workload" if file is not None else "--trace"
        raise CliError(f"{shape.given[0]} and {source} exclude each other; --load R scales arrivals to R requests/s")
    if file is not None:
        from measure.workload.spec import load_workload

        return load_workload(file, changes=_changes(limits))
    if trace is not None:
        return _parsed(trace.stem, {"trace": {"path": trace} | _without_none(asdict(replay))}, limits)
    if limits.duration is None and limits.requests is None:
        limits = replace(limits, duration=DEFAULT_DURATION_S)
    name = f"rate-{shape.rate or DEFAULT_RATE:g}" if shape.concurrency is None else f"concurrency-{shape.concurrency}"
    return _parsed(name, _session_stream(shape), limits)


def _has_sessions(trace: Path) -> bool:
    from measure.workload.session_files import is_session_trace

    return is_session_trace(trace)


def _recorded_stream(
    trace: Path, shape: SessionOptions, replay: TraceReplayOptions, recorded: RecordedOptions
) -> dict[str, Any]:
    of_loops = ("--rate", "--arrivals", "--burstiness", "--concurrency", "--turns")
    for flag in shape.given:
        if flag not in of_loops:
            raise CliError(f"{flag} and a trace of sessions exclude each other: the trace says what is asked")
    if shape.turns is not None and not shape.turns.isdecimal():
        raise CliError(f"--turns: {shape.turns!r}; of a trace of sessions say how many requests of each, such as 20")
    loops = _session_stream(replace(shape, turns=None))
    sessions = {
        "path": trace,
        **asdict(replay),
        "longest": recorded.longest,
        "max_pause_s": recorded.max_pause,
        "shares_tools": recorded.share_tools,
        "turns": None if shape.turns is None else int(shape.turns),
    }
    stream = {"arrivals": loops.get("arrivals"), "concurrency": loops.get("concurrency"), "ramp_s": recorded.ramp}
    return _without_none(stream | {"sessions": _without_none(sessions)})


def _session_stream(shape: SessionOptions) -> dict[str, Any]:
    if shape.concurrency is not None:
        for name in ("rate", "arrivals", "burstiness"):
            if getattr(shape, name) is not None:
                raise CliError(f"{_flag(name)} is for an open loop, --concurrency for a closed one: give one of them")
    if shape.prefix_tokens is None and (shape.prefix_share is not None or shape.prefix_count is not None):
        raise CliError("--prefix-share and --prefix-count need --prefix-tokens, the length of a shared prefix")
    arrivals = {
        "rate": DEFAULT_RATE if shape.rate is None else shape.rate,
        "process": shape.arrivals or (Process.GAMMA if shape.burstiness is not None else Process.POISSON),
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


def _parsed(name: str, stream: dict[str, Any], limits: Limits) -> "WorkloadSpec":
    from measure.workload.spec import WorkloadError, parse_workload

    try:
        return parse_workload(_changes(limits) | {"name": name, "streams": [{"name": _STREAM} | stream]}, source="")
    except WorkloadError as error:
        raise CliError("\n".join(map(_by_option, str(error).splitlines()))) from None


def _changes(limits: Limits) -> dict[str, Any]:
    """Return the keys of a workload that are given."""
    keys = {"duration_s": limits.duration, "max_requests": limits.requests}
    return _without_none(keys | {"content": limits.content, "seed": limits.seed})


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
"""Option that sets each key of a stream."""


def _by_option(line: str) -> str:
    """Return an error of a workload with the option in place of the key."""
    key, _, reason = line.removeprefix(":").partition(":")
    return f"{_OPTIONS.get(key.removeprefix('streams.0.'), key)}:{reason}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _without_none(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}
