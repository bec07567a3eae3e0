"""Measures, judges and shows a load test, for the commands of `kvrelay bench`."""

import asyncio
import dataclasses
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cli.bench_options import EXIT_BELOW_BOUND, REQUIRED_SHARE, Judgement, Output
from cli.console import err, print_wide
from cli.errors import CliError

if TYPE_CHECKING:
    from common.slo import Slo
    from measure.load.records import Run
    from measure.load.spec import LoadSpec
    from measure.load.summary import Summary

SUMMARY_FILE, REPORT_FILE, COMPARISON_FILE = "summary.json", "report.html", "comparison.html"


def measure(spec: "LoadSpec", folder: Path) -> "tuple[Run, bool]":
    """Send the load; return what was measured, which `folder` keeps, and whether a signal ended it early.

    Ctrl-C or SIGTERM ends the run; a second one abandons it. Raises LoadTestFailed, KvrelayError, StoreError.
    """
    from measure.load.live import LiveView
    from measure.load.run import run_load
    from measure.load.spec import LoadTestFailed, Observers
    from measure.load.store import RunWriter

    async def send() -> "tuple[Run, bool]":
        stop = asyncio.Event()
        with _first_interrupt_sets(stop):
            return await run_load(spec, Observers(writer, live), stop=stop), stop.is_set()

    with RunWriter(folder) as writer, LiveView(err) as live:
        try:
            measured, was_interrupted = asyncio.run(send())
        except LoadTestFailed as error:
            if error.run.requests:
                writer.finish(error.run.info)
            raise
        finally:
            writer.discard_if_empty()
        if not measured.requests:
            raise CliError("the run ended before a request was due")
        writer.finish(measured.info)
    return measured, was_interrupted


def judge(measured: "Run", judgement: Judgement) -> "Summary":
    """Return a run's summary. Raises NothingMeasured."""
    from measure.load.measures import summarize

    return summarize(measured, slo=judgement.slo, warm_up_s=judgement.warm_up_s, cool_down_s=judgement.cool_down_s)


def show(measured: "Run", judgement: Judgement, folder: Path, output: Output) -> None:
    """Judge a run, write summary and page to `folder`, print it. Exits when fewer requests than required are good."""
    summary = judge(measured, judgement)
    text = json.dumps(dataclasses.asdict(summary), ensure_ascii=False, indent=1)
    (folder / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")
    if output.with_report:
        from measure.load.report.page import write_report

        write_report(measured, summary, folder / REPORT_FILE)
        err.print(f"The page is {folder / REPORT_FILE}", soft_wrap=True)
    if output.as_json:
        typer.echo(text)
    else:
        from measure.load.tables import summary_view

        required_share = REQUIRED_SHARE if judgement.required_share is None else judgement.required_share
        print_wide(summary_view(summary, required_share=required_share))
    share = summary.overall.good_share.value
    if judgement.required_share is not None and share < judgement.required_share:
        err.print(f"{share:.2%} of the requests are good, {judgement.required_share:.2%} are required", soft_wrap=True)
        raise typer.Exit(EXIT_BELOW_BOUND)


def earlier_objectives(folder: Path) -> "Slo | None":
    """Return the objectives of a run's last judgement; None without one. Raises CliError."""
    from common.slo import Slo

    path = folder / SUMMARY_FILE
    if not path.exists():
        return None
    try:
        return Slo.of(json.loads(path.read_text(encoding="utf-8"))["slo"])
    except (ValueError, TypeError, KeyError) as error:
        raise CliError(f"{path}: is no summary of a run; remove it, and give the objectives") from error


@contextmanager
def _first_interrupt_sets(stop: asyncio.Event) -> Iterator[None]:
    """Make the first Ctrl-C or SIGTERM set `stop`; later ones have their usual effect. Main thread, in its loop."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def interrupt() -> None:
        restore()
        err.print("ending the run: what still runs is cancelled, what was measured is kept", soft_wrap=True)
        stop.set()

    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        restore()
