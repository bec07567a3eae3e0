"""`kvrelay trace`: makes and describes request traces."""

from pathlib import Path
from typing import Annotated

import typer

from cli.console import err, print_wide

trace_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@trace_app.callback()
def trace() -> None:
    """Make request traces and describe them."""


@trace_app.command()
def stats(
    path: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="Mooncake or a recording (.jsonl), Azure (.csv), or recorded sessions."),
    ],
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Number of caches.")] = 8,
    blocks: Annotated[int, typer.Option("--blocks", "-b", min=1, help="Blocks per cache.")] = 3000,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=1,
            help="Number of requests, or sessions, from the beginning; default: all.",
            show_default=False,
        ),
    ] = None,
    trace_block_size: Annotated[
        int | None,
        typer.Option(
            "--trace-block-size",
            min=1,
            metavar="TOKENS",
            help="Tokens per block id; default: as stated in the file, else 512.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the rate, lengths and reuse of a trace, and the cache hits of two placements.

    \b
    round robin   each worker in turn
    sticky        the worker with most of the prefix, if more than one block;
                  else the worker that has computed least

    Caches evict the least recently used blocks; the end of a prompt goes first.
    Of recorded sessions it prints lengths, reuse within sessions, and pauses.
    """  # noqa: D301 - \b marks a preformatted block
    from itertools import islice

    from measure.workload.session_files import is_session_trace, read_sessions
    from measure.workload.trace_stats import (
        placement_line,
        round_robin_hits,
        session_stats_table,
        stats_table,
        sticky_hits,
        trace_stats,
    )
    from measure.workload.traces import TraceError, read_trace

    if is_session_trace(path):
        sessions = list(islice(read_sessions(path), limit))
        if not sessions:
            raise TraceError(f"{path}: has no sessions")
        print_wide(session_stats_table(sessions))
        return
    trace = read_trace(path, block_size=trace_block_size)
    if limit is not None:
        trace = trace.first(limit)
    table = stats_table(trace_stats(trace))
    on = f"{workers} × {blocks:,} blocks"
    for name, place in (("round robin", round_robin_hits), ("sticky", sticky_hits)):
        hits = place(trace, num_workers=workers, blocks_per_worker=blocks)
        table.add_row(*placement_line(f"{name}, {on}", hits))
    print_wide(table)


@trace_app.command()
def synth(
    path: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="File of the trace.")],
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Number of requests.")] = 12_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the trace.")] = 0,
    rate: Annotated[float, typer.Option("--rate", min=0.001, help="Mean requests per second.")] = 3.4,
    burst_period: Annotated[
        float,
        typer.Option("--burst-period", min=0, metavar="SECONDS", help="Period of batched arrivals; 0: no batches."),
    ] = 3.0,
) -> None:
    """Write a trace of synthetic traffic: chats in turns, agents with growing contexts, long single prompts.

    Lengths, bursts and reuse resemble those of the published Mooncake
    conversation trace, and the format is the same. It contains no text and no
    user data.
    """
    from measure.workload.synth import SynthSettings, synthesize
    from measure.workload.traces import TraceError, write_trace

    if path.suffix != ".jsonl":
        raise TraceError(f"{path}: a trace in this format must end in .jsonl")
    settings = SynthSettings(num_requests=requests, seed=seed, requests_per_s=rate, burst_period_s=burst_period)
    write_trace(path, synthesize(settings).requests)
    err.print(f"{requests:,} requests are in {path}; look at them with `kvrelay trace stats {path}`", soft_wrap=True)
