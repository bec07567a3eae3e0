"""`kvrelay experiment`: one workload on many pool shapes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import Progress, err, print_wide, repeating
from cli.errors import EXIT_FAILURE, CliError
from cli.options import positive_numbers
from common.signals import sigterm_interrupts

if TYPE_CHECKING:
    from measure.experiment.prepare import Experiment, SimulatedWorkloads, Workloads
    from measure.experiment.runner import Bench, Report
    from measure.experiment.store import Store

experiment_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

_REPORT_REQUESTS_S = 5.0
OutOption = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Results.")]


@experiment_app.callback()
def experiment() -> None:
    """Measure a workload on many pool shapes, real and simulated."""


@experiment_app.command()
def run(
    path: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The experiment.")],
    out: OutOption,
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Search for each arm's highest load that meets the objectives.")
    ] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="Run in virtual time, without a cluster.")] = False,
    only: Annotated[
        str, typer.Option("--only", metavar="ARM,…", help="Only these arms or shapes.", show_default=False)
    ] = "",
    loads: Annotated[
        str,
        typer.Option(
            "--loads", metavar="X,Y,…", help="Loads in requests/s, in place of the file's.", show_default=False
        ),
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="Replace earlier results in the folder.")] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Number of simulated arms at a time, each in a process.")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file and show its arms and loads.")] = False,
) -> None:
    """Run an experiment: start every arm, warm it up, measure it, stop it.

    \b
    kvrelay experiment run documents.yaml --out results --dry-run
    kvrelay experiment run documents.yaml --out results
    kvrelay experiment run documents.yaml --out results --simulate

    Finished runs are kept: the same command continues where it stopped, and
    more loads, arms or repeats in the file add to the results. Failures are
    noted, tried again next time, and make the exit status 1.
    """  # noqa: D301 - \b marks a preformatted block
    from measure.experiment.points import Source
    from measure.experiment.prepare import Choices, prepare
    from measure.experiment.store import Store

    source = Source.SIMULATED if simulate else Source.REAL
    chosen = tuple(name.strip() for name in only.split(",") if name.strip())
    if jobs > 1 and not simulate:
        raise CliError("--jobs: real arms would slow each other down; use it with --simulate")
    choices = Choices(source=source, only=chosen, loads=positive_numbers(loads, option="--loads") if loads else ())
    prepared = prepare(path, choices)
    _show_added(prepared)
    store = Store(out)
    if dry_run:
        _show_plan(prepared, _bench(prepared, store, err.print), find_capacity=find_capacity)
        return
    if again:
        store.forget()
    prepared.claim(store)
    make_bench = partial(_bench, prepared, store)
    is_complete = measure_missing(prepared, store, make_bench, num_jobs=jobs, is_search=find_capacity)
    _show(store)
    if not is_complete:
        raise typer.Exit(EXIT_FAILURE)


@experiment_app.command()
def report(out: Annotated[Path, typer.Argument(metavar="DIR", help="An experiment's results.")]) -> None:
    """Print an experiment's table and write its page, real and simulated points together."""
    from measure.experiment.store import Store

    if not (out / "settings.json").exists():
        raise CliError(f"{out} holds no results of an experiment; make some with `kvrelay experiment run`")
    _show(Store(out))


def measure_missing(
    prepared: "Experiment[SimulatedWorkloads]",
    store: "Store",
    make_bench: "Callable[[Report], Bench]",
    *,
    num_jobs: int,
    is_search: bool = False,
) -> bool:
    """Measure the cells that the store lacks and report the progress; return whether all were measured."""
    from measure.experiment.ended import start_counting
    from measure.experiment.runner import ResultKeeper
    from measure.experiment.search import measure, measure_side_by_side

    num_ended = start_counting()
    with sigterm_interrupts(), Progress() as report:

        def report_requests() -> None:
            if num_ended.value:
                report(f"{num_ended.value:,} requests have ended")

        with repeating(report_requests, every_s=_REPORT_REQUESTS_S):
            if num_jobs > 1:
                measure_side_by_side(prepared, store, num_jobs=num_jobs, is_search=is_search, report=report)
            keeper = ResultKeeper(store, prepared.source, report)
            measure(prepared, keeper, make_bench(report), is_search=is_search)
    return not keeper.failures


def _bench(prepared: "Experiment[Workloads]", store: "Store", report: "Report") -> "Bench":
    from measure.experiment.points import Source

    if prepared.source is Source.SIMULATED:
        from measure.experiment.simulated import SimulatedBench

        return SimulatedBench(prepared.spec, prepared.workloads)
    from measure.experiment.real import RealBench

    return RealBench(prepared.spec, prepared.path, workloads=prepared.workloads, store=store, report=report)


def _show(store: "Store") -> None:
    from measure.experiment.points import LoadUnit
    from measure.experiment.report import findings_of, write_report
    from measure.experiment.session_page import session_table
    from measure.experiment.tables import arms_table, loads_table
    from measure.load.tables import terminal_table

    findings = findings_of(store)
    for each in findings:
        print_wide(loads_table(each))
        points = list(each.points)
        of_sessions = [point for point in points if point.load_unit is not LoadUnit.REQUESTS and point.sessions]
        print_wide(terminal_table(session_table(of_sessions)) if of_sessions else arms_table(each))
    for failure in store.failures():
        err.print(f"not measured: {failure}", soft_wrap=True)
    if findings:
        err.print(f"The page is {write_report(store, findings)}", soft_wrap=True)


def _show_added(prepared: "Experiment[Workloads]") -> None:
    for name in prepared.arms.added:
        err.print(f"{name} is added, to compare with: no aggregated shape of this size is named", soft_wrap=True)


def _show_plan(prepared: "Experiment[Workloads]", bench: "Bench", *, find_capacity: bool) -> None:
    from itertools import groupby

    from measure.experiment.runner import span

    for plan in prepared.arms.plans:
        arm = plan.arm
        workers = f"{arm.num_prefill} prefill, {arm.num_decode} decode" if arm.num_prefill else f"{arm.num_decode}"
        settings = "".join(f", {key} {value}" for key, value in arm.settings.items())
        err.print(f"{arm.name}: {workers} workers{settings}{f', at {plan.url}' if plan.url else ''}", soft_wrap=True)
    if find_capacity:
        spec = prepared.spec.capacity
        most_s = len(prepared.arms.plans) * bench.seconds(spec.max_loads * spec.repeats, 1)
        err.print(f"a search of at most {spec.max_loads} loads on each arm: at most {span(most_s)}", soft_wrap=True)
        return
    cells = prepared.cells
    num_starts = len(list(groupby(cells, key=lambda cell: cell.arm)))
    loads = ", ".join(f"{load:g}" for load in prepared.spec.loads)
    err.print(
        f"{len(cells)} runs, at {loads} requests/s, {prepared.spec.repeats} of each;"
        f" about {span(bench.seconds(len(cells), num_starts))}",
        soft_wrap=True,
    )
