"""`kvrelay bench`: load tests of this system and others."""

import typer

from cli.bench_record import record
from cli.bench_results import compare, report
from cli.bench_run import run

bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@bench_app.callback()
def bench() -> None:
    """Put a server under load, and measure what its users see.

    \b
    kvrelay bench run --rate 4 --ttft 0.5 --itl 0.05    does it meet these objectives?
    kvrelay bench report DIR --ttft 1                   and others?
    kvrelay bench compare DIR1 DIR2                     is one better than the other?
    kvrelay bench record today.jsonl --duration 600     live traffic, to be replayed
    """  # noqa: D301 - \b marks a preformatted block


bench_app.command()(run)
bench_app.command()(report)
bench_app.command()(compare)
bench_app.command()(record)
