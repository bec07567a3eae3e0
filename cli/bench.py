"""`kvrelay bench`: load tests of this system and others; `bench run` and `bench record` are here."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.bench_options import (
    CheckOption,
    Criteria,
    OutputOptions,
    counted,
    objective,
    output,
    served_objectives,
)
from cli.bench_results import compare, measure, report, show
from cli.bench_workload import (
    Limits,
    RecordedOptions,
    SessionOptions,
    TraceOption,
    TraceReplayOptions,
    WorkloadOption,
    workload_spec,
)
from cli.console import Progress, err
from cli.errors import EXIT_INTERRUPTED, CliError
from cli.options import DEFAULT_CONFIG, ApiKeyOption, CaOption, ConfigOption, options_from_dataclasses
from cli.target import ConnectionOptions, find_cluster
from common.signals import sigterm_interrupts, uninterrupted

if TYPE_CHECKING:
    from kvrelay.client import TrafficStream
    from measure.load.targets.interface import TargetSpec
    from measure.workload.traces import TrafficTrace

_RESULTS = Path("bench-results")
_target = partial(typer.Option, rich_help_panel="Target")
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@bench_app.callback()
def bench() -> None:
    """Put a server under load and measure the latencies of its users.

    \b
    kvrelay bench run --rate 4 --ttft 0.5 --tpot 0.05   test a server against these objectives
    kvrelay bench report DIR --ttft 1                   judge the same run by others
    kvrelay bench compare DIR1 DIR2                     compare two runs
    kvrelay bench record today.jsonl --duration 600     record live traffic for a replay
    """  # noqa: D301 - \b marks a preformatted block


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options for the server under load."""

    target: Annotated[
        str | None,
        _target(
            "--target",
            "-T",
            metavar="URL",
            envvar="KVRELAY_TARGET",
            help="HOST:PORT of a kvrelay router, or http(s)://HOST[:PORT]/v1 of any OpenAI-compatible server,"
            " anthropic+http(s)://… of one with Anthropic's API;"
            " default: the cluster that `kvrelay up` started.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None, _target("--model", "-m", help="Name of a served model; default: the first one.", show_default=False)
    ] = None
    api_key: ApiKeyOption = None
    ca: CaOption = None
    direct: Annotated[bool, _target("--direct", help="Stream tokens from the decode workers (gRPC).")] = False
    config_path: ConfigOption = DEFAULT_CONFIG

    def spec(self) -> "TargetSpec":
        """Return the given server, else the running cluster."""
        from measure.load.targets.interface import TargetSpec

        options: dict[str, Any] = {"api_key": self.api_key, "model": self.model, "direct": self.direct}
        if self.target is not None:
            return TargetSpec(url=self.target, tls=None if self.ca is None else str(self.ca), **options)
        cluster = find_cluster(None, self.ca, self.config_path)
        return TargetSpec(url=cluster.address, tls=cluster.tls, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """Options for sending requests and keeping the results."""

    state_objectives: Annotated[
        bool,
        objective(
            "--tell-objectives/--no-tell-objectives",
            help="Name --ttft and --tpot in each request, so that a kvrelay server acts by them.",
            show_default=True,
        ),
    ] = True
    drain: Annotated[
        float,
        counted("--drain", min=0, metavar="SECONDS", help="Time after the load until running requests are cancelled."),
    ] = 120.0
    timeout: Annotated[
        float,
        counted("--timeout", min=0.001, metavar="SECONDS", help="Longest duration of a request after it is sent."),
    ] = 600.0
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            help="Number of sending processes; default: one, and more when it is busy.",
            show_default=False,
            rich_help_panel="Generator",
        ),
    ] = None
    out: Annotated[
        Path | None,
        output("--out", "-o", metavar="DIR", help=f"Results; default: a new folder in {_RESULTS}.", show_default=False),
    ] = None
    label: Annotated[
        list[str] | None,
        output(
            "--label",
            "-l",
            metavar="KEY=VALUE",
            help="Label of the results; repeatable. name=… names the run.",
            show_default=False,
        ),
    ] = None


@bench_app.command()
@options_from_dataclasses
def run(
    *,
    server: ServerOptions,
    workload: WorkloadOption = None,
    shape: SessionOptions,
    limits: Limits,
    trace: TraceOption = None,
    replay: TraceReplayOptions,
    recorded: RecordedOptions,
    criteria: Criteria,
    check: CheckOption = None,
    sending: Sending,
    shown: OutputOptions,
) -> None:
    """Put a server under load and measure the latencies of its users.

    \b
    kvrelay bench run                                      one request a second, for a minute
    kvrelay bench run --rate 4 --duration 120 --ttft 0.5 --tpot 0.05
    kvrelay bench run -k 16 --turns 6 --prefix-tokens 300  sixteen chats at any time
    kvrelay bench run --trace conversation.jsonl --shrink 16 --load 2
    kvrelay bench run --trace sessions.jsonl.gz --shrink 32 -k 8 --content chat
    kvrelay bench run -T http://127.0.0.1:8000/v1 -w chats.yaml --check 0.99

    Requests are sent when they are due, whether or not others have been answered,
    and latencies count from then. DIR holds every request, a summary and a page
    of plots. Ctrl-C ends the run and keeps the results.

    A good request is answered completely, with its first token and the mean gap
    between its tokens within the objectives; refused and failed ones are not good.
    """  # noqa: D301 - \b marks a preformatted block
    from measure.load.spec import LoadSpec
    from measure.workload.build import build_workload

    labels = _labels(sending.label or [])
    specification = workload_spec(workload, trace, shape, replay, recorded, limits)
    judgement = criteria.judgement(served_objectives(server.config_path), check)
    name = labels.pop("name", specification.name)
    scaled = {} if limits.load is None else {"load": limits.load}
    spec = LoadSpec(
        name=name,
        target=server.spec(),
        workload=build_workload(specification, load=limits.load),
        specification=specification.model_dump(mode="json", exclude_none=True) | scaled,
        slo=None if criteria.ttft is None and criteria.tpot is None else judgement.slo,
        states_objectives=sending.state_objectives,
        timeout_s=sending.timeout,
        drain_s=sending.drain,
        processes=sending.processes,
        labels=labels,
    )
    folder = sending.out or _new_folder(name)
    measured, was_interrupted = measure(spec, folder)
    err.print(f"Every request is in {folder}; `kvrelay bench report {folder}` judges it again", soft_wrap=True)
    show(measured, judgement, folder, shown)
    if was_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


bench_app.command()(report)
bench_app.command()(compare)


@bench_app.command()
@options_from_dataclasses
def record(
    path: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="File of the trace.")],
    duration_s: Annotated[
        float | None,
        typer.Option(
            "--duration",
            "-d",
            min=0.001,
            metavar="SECONDS",
            help="Record the requests of this time, and wait for their ends; default: until Ctrl-C.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Stop after this many requests.", show_default=False)
    ] = None,
    *,
    connection: ConnectionOptions,
) -> None:
    """Record live traffic as a trace: arrivals, lengths, and the prefixes that prompts share.

    No content leaves the cluster: prompts are represented by keys that are
    meaningless outside the recording. Only the caller's own tenant is recorded.
    Ctrl-C ends the recording and writes it.

    \b
    kvrelay bench record today.jsonl --duration 600
    kvrelay trace stats today.jsonl
    """  # noqa: D301 - \b marks a preformatted block
    from measure.workload.traces import TrafficTrace

    if path.suffix != ".jsonl":
        raise CliError(f"{path}: a recording must end in .jsonl")
    trace = TrafficTrace()
    with connection.client() as client:
        stream = client.record(duration_s=duration_s)
        with sigterm_interrupts(), suppress(KeyboardInterrupt):
            _read(stream, trace, limit)
    if not trace.num_requests:
        raise CliError("no request ended while the recording ran; nothing was written")
    with uninterrupted():
        trace.write(path)
    if stream.num_dropped:
        err.print(
            f"{stream.num_dropped} requests are missing: they came faster than they could be read", soft_wrap=True
        )
    err.print(
        f"{trace.num_requests:,} requests are in {path}; look at them with `kvrelay trace stats {path}`", soft_wrap=True
    )


def _read(stream: "TrafficStream", trace: "TrafficTrace", limit: int | None) -> None:
    with Progress() as report, stream:
        report("recording")
        for request in stream:
            trace.add(request)
            report.update(f"recording: {trace.num_requests:,} requests so far")
            if trace.num_requests == limit:
                return


def _labels(texts: Sequence[str]) -> dict[str, str]:
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise CliError(f"--label: {text!r} is not KEY=VALUE")
        labels[key] = value
    return labels


def _new_folder(name: str) -> Path:
    """Return a folder that does not exist."""
    stem = "".join(character if character.isalnum() or character in "-_." else "-" for character in name)
    folder = _RESULTS / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 2
    while folder.exists():
        folder = _RESULTS / f"{folder.name.partition('~')[0]}~{number}"
        number += 1
    return folder
