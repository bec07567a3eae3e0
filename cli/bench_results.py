"""`kvrelay bench report` and `kvrelay bench compare`, and how a load test is measured, judged and shown."""

import asyncio
import dataclasses
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.bench_options import (
    EXIT_BELOW_BOUND,
    REQUIRED_SHARE,
    CheckOption,
    Criteria,
    Judgement,
    OutputOptions,
    output,
    served_objectives,
)
from cli.console import err, print_wide
from cli.errors import CliError
from cli.options import DEFAULT_CONFIG, ConfigOption, options_from_dataclasses

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
    from measure.load.spec import LoadTestFailed
    from measure.load.store import RunWriter

    async def send() -> "tuple[Run, bool]":
        stop = asyncio.Event()
        with _first_interrupt_sets(stop):
            return await run_load(spec, writer, live, stop=stop), stop.is_set()

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
    """Return a run's summary. Raises NothingMeasured, StoreError."""
    from measure.load.measures import summarize
    from measure.load.session_figures import with_idle_times
    from measure.load.store import read_run

    if judgement.idle is not None:
        requests = with_idle_times(measured.requests, read_run(judgement.idle).requests)
        measured = dataclasses.replace(measured, requests=requests)
    return summarize(
        measured,
        slo=judgement.slo,
        warm_up_s=judgement.warm_up_s,
        cool_down_s=judgement.cool_down_s,
        stretch=judgement.stretch,
    )


def show(measured: "Run", judgement: Judgement, folder: Path, output: OutputOptions) -> None:
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
        return Slo(**json.loads(path.read_text(encoding="utf-8"))["slo"])
    except (ValueError, TypeError, KeyError) as error:
        raise CliError(f"{path}: is not a summary of a run; remove it, and give the objectives") from error


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


@options_from_dataclasses
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results of `kvrelay bench run`.")],
    *,
    config_path: ConfigOption = DEFAULT_CONFIG,
    criteria: Criteria,
    check: CheckOption = None,
    shown: OutputOptions,
) -> None:
    """Judge a finished run again, by other objectives or another warm-up.

    \b
    kvrelay bench report bench-results/rate-4-20260101-120000 --ttft 1
    kvrelay bench report DIR --warm-up 20 --json | jq .kinds[0].good_share

    Writes summary.json and report.html in DIR again; the requests stay as they
    are. Objectives that are not given are those of the last judgement.
    """  # noqa: D301 - \b marks a preformatted block
    from measure.load.store import read_run

    defaults = earlier_objectives(folder) or served_objectives(config_path)
    show(read_run(folder), criteria.judgement(defaults, check), folder, shown)


@options_from_dataclasses
def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="A B …", help="Results; the others are compared with the first.")
    ],
    *,
    config_path: ConfigOption = DEFAULT_CONFIG,
    criteria: Criteria,
    out: Annotated[
        Path | None,
        output(
            "--out",
            "-o",
            metavar="FILE.html",
            help="File of the page of overlaid plots; default: comparison.html in the last folder.",
            show_default=False,
        ),
    ] = None,
    shown: OutputOptions,
) -> None:
    """Compare runs and separate differences from chance.

    \b
    kvrelay bench compare bench-results/before bench-results/after
    kvrelay bench compare kvrelay vllm --ttft 1 --out side-by-side.html

    All are judged by the same objectives, by default those of the first run. Runs
    of the same workload and seed are compared request by request, which finds
    smaller differences.
    """  # noqa: D301 - \b marks a preformatted block
    from measure.load.comparison import compare as compare_runs
    from measure.load.comparison import comparison_view
    from measure.load.store import read_run

    if len(folders) < 2:
        raise CliError("compare takes two or more folders of results")
    defaults = earlier_objectives(folders[0]) or served_objectives(config_path)
    judgement = criteria.judgement(defaults)
    runs = [read_run(folder) for folder in folders]
    names = _names(folders, [run.info.name for run in runs])
    runs = [
        dataclasses.replace(run, info=dataclasses.replace(run.info, name=name))
        for run, name in zip(runs, names, strict=True)
    ]
    comparison = compare_runs(runs, [judge(run, judgement) for run in runs])
    if shown.with_report:
        from measure.load.report.page import write_comparison

        page = out or folders[-1] / COMPARISON_FILE
        page.parent.mkdir(parents=True, exist_ok=True)
        write_comparison(runs, comparison, page)
        err.print(f"The page is {page}", soft_wrap=True)
    if shown.as_json:
        typer.echo(json.dumps({"names": names} | dataclasses.asdict(comparison), ensure_ascii=False, indent=1))
    else:
        print_wide(comparison_view(comparison, names))


def _names(folders: Sequence[Path], names: Sequence[str]) -> list[str]:
    """Return names for the runs: their own where these differ, else those of their folders, else numbered ones."""
    for candidates in (list(names), [folder.resolve().name for folder in folders]):
        if len(set(candidates)) == len(candidates):
            return candidates
    return [f"{name} {number}" for number, name in enumerate(names, start=1)]
