"""`kvrelay bench record`."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import Progress, err
from cli.errors import CliError
from cli.options import options_from_dataclasses
from cli.target import ConnectionOptions
from common.signals import sigterm_interrupts, uninterrupted

if TYPE_CHECKING:
    from kvrelay.client import TrafficStream
    from measure.workload.traces import TrafficTrace


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
