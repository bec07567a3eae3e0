"""`kvrelay simulate`: replays a trace under placement policies, in virtual time."""

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import Progress, err, print_wide
from cli.errors import CliError

if TYPE_CHECKING:
    from measure.simulate.comparison import Comparison
    from measure.simulate.replay import CellResult, Hardware

_WORKLOAD, _CLUSTER, _SIGNALS, _RUN = "Workload", "Simulated cluster", "What the router is told, and when", "Run"
_STEP_TOKENS_DISAGGREGATED = 8192
_STEP_TOKENS_AGGREGATED = 512


class Shed(enum.StrEnum):
    """`router.shed` of serving.yaml."""

    NONE = "none"
    DEADLINE = "deadline"
    SLO = "slo"


def simulate(
    trace: Annotated[
        Path,
        typer.Option("--trace", "-t", help="Mooncake (.jsonl) or Azure (.csv).", rich_help_panel=_WORKLOAD),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Results.", rich_help_panel=_RUN)],
    policy: Annotated[
        str, typer.Option("--policy", "-p", metavar="A,B,…|all", help="Policies to compare.", rich_help_panel=_RUN)
    ] = "all",
    speed: Annotated[
        str,
        typer.Option(
            "--speed", "-s", metavar="X,Y,…", help="Arrivals so many times faster.", rich_help_panel=_WORKLOAD
        ),
    ] = "1",
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, help="Only the first requests.", rich_help_panel=_WORKLOAD),
    ] = None,
    shrink: Annotated[
        int, typer.Option("--shrink", min=1, help="Divide all lengths by this.", rich_help_panel=_WORKLOAD)
    ] = 1,
    ttft: Annotated[
        float,
        typer.Option(
            "--ttft", min=0, metavar="SECONDS", help="Objective per 8192 prompt tokens.", rich_help_panel=_WORKLOAD
        ),
    ] = 2.0,
    itl: Annotated[
        float,
        typer.Option(
            "--itl", min=0, metavar="SECONDS", help="Objective for the mean gap of tokens.", rich_help_panel=_WORKLOAD
        ),
    ] = 0.05,
    workers: Annotated[
        str,
        typer.Option("--workers", "-w", metavar="4P4D|8", help="Both pools, or one.", rich_help_panel=_CLUSTER),
    ] = "4P4D",
    aggregated: Annotated[
        bool, typer.Option("--aggregated", help="As many workers in one pool.", rich_help_panel=_CLUSTER)
    ] = False,
    blocks: Annotated[
        int, typer.Option("--blocks", "-b", min=1, help="KV pages of a worker.", rich_help_panel=_CLUSTER)
    ] = 3000,
    block_size: Annotated[
        int, typer.Option("--block-size", min=2, metavar="TOKENS", help="Of a page.", rich_help_panel=_CLUSTER)
    ] = 512,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            "--step-tokens",
            min=1,
            help=f"Budget of a step; default: {_STEP_TOKENS_DISAGGREGATED}, aggregated {_STEP_TOKENS_AGGREGATED}.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="llama-70b or qwen3-8b.", rich_help_panel=_CLUSTER)
    ] = "llama-70b",
    device: Annotated[
        str, typer.Option("--device", help="h100, h100-tp4 or h200-tp4.", rich_help_panel=_CLUSTER)
    ] = "h100-tp4",
    timing: Annotated[
        Path | None,
        typer.Option(
            "--timing",
            metavar="FILE",
            help="Timings fitted on real workers, in place of --model and --device.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    routers: Annotated[int, typer.Option("--routers", min=1, help="Side by side.", rich_help_panel=_SIGNALS)] = 1,
    event_lag: Annotated[
        float,
        typer.Option("--event-lag", min=0, metavar="SECONDS", help="Age of what it hears.", rich_help_panel=_SIGNALS),
    ] = 0.02,
    report_interval: Annotated[
        float,
        typer.Option(
            "--report-interval", min=0, metavar="SECONDS", help="Between two reports.", rich_help_panel=_SIGNALS
        ),
    ] = 0.1,
    shed: Annotated[
        Shed,
        typer.Option("--shed", help="What it refuses at once: what must miss this.", rich_help_panel=_SIGNALS),
    ] = Shed.DEADLINE,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same results.", rich_help_panel=_RUN)] = 0,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs side by side.", rich_help_panel=_RUN)] = 1,
    again: Annotated[
        bool, typer.Option("--again", help="Replace earlier results in the folder.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Replay a trace in virtual time: real router and workers, simulated work.

    \b
    kvrelay simulate -t conversation.jsonl --speed 0.5,1,2,3 --out results -j 2
    kvrelay simulate -t conversation.jsonl -p round_robin --aggregated --out one

    One run per policy and speed. Steps, copies and messages only take time; all
    else is the code that serves. Prints a table and writes it to DIR with a page
    of plots (report.html) and every request's fate. Finished runs are kept: the
    same command goes on where it was stopped.

    A good request is answered to its end within both objectives; those that are
    refused count as failures.
    """  # noqa: D301 - \b marks a preformatted block
    from common.slo import Slo
    from measure.simulate.comparison import Comparison
    from measure.simulate.replay import ReplaySettings
    from measure.simulate.report import write_report

    num_prefill, num_decode = _workers(workers, aggregated=aggregated)
    comparison = Comparison(
        settings=ReplaySettings(
            trace=trace,
            num_requests=limit,
            shrink=shrink,
            num_prefill=num_prefill,
            num_decode=num_decode,
            num_routers=routers,
            num_blocks=blocks,
            block_size=block_size,
            max_step_tokens=step_tokens or _default_step_tokens(timing, num_prefill=num_prefill),
            hardware=_hardware(model, device, timing),
            slo=Slo(ttft_s=ttft, tpot_s=itl),
            shed=shed.value,
            event_lag_s=event_lag,
            report_interval_s=report_interval,
            seed=seed,
        ),
        policies=_policies(policy),
        speeds=_speeds(speed),
        out=out,
    )
    if again:
        comparison.forget()
    comparison.prepare()
    results = _run(comparison, num_jobs=jobs)
    page = write_report(comparison, results)
    from measure.simulate.tables import comparison_table

    print_wide(comparison_table(results))
    err.print(f"The page is {page}", soft_wrap=True)


def _run(comparison: "Comparison", *, num_jobs: int) -> "list[CellResult]":
    num_cells, num_done = len(comparison.cells), 0
    with Progress() as report:
        report(f"{num_cells} runs of {comparison.settings.trace.name}, {num_jobs} at a time")

        def tell(result: "CellResult") -> None:
            nonlocal num_done
            num_done += 1
            summary = result.summary
            report(
                f"[{num_done}/{num_cells}] {result.cell.policy} at speed {result.cell.speed:g}:"
                f" {summary.goodput_per_s:.2f} good requests/s, {summary.token_hit:.1%} hits;"
                f" took {result.clock.wall_s:.1f} s"
            )

        return comparison.run(num_jobs=num_jobs, report=tell)


def _workers(text: str, *, aggregated: bool) -> tuple[int, int]:
    from measure.simulate.records import ClusterShape

    try:
        num_prefill, num_decode = ClusterShape.parse_workers(text)
    except ValueError as error:
        raise CliError(f"--workers: {error}") from None
    return (0, num_prefill + num_decode) if aggregated else (num_prefill, num_decode)


def _default_step_tokens(timing: Path | None, *, num_prefill: int) -> int:
    from measure.simulate.timing_file import read_timing

    if timing is not None:
        return read_timing(timing)[0].max_step_tokens
    return _STEP_TOKENS_DISAGGREGATED if num_prefill else _STEP_TOKENS_AGGREGATED


def _hardware(model: str, device: str, timing: Path | None) -> "Hardware":
    from measure.simulate.replay import Hardware
    from measure.simulate.roofline import DEVICES, MODELS

    for option, name, known in (("--model", model, MODELS), ("--device", device, DEVICES)):
        if name not in known:
            raise CliError(f"{option}: {name!r} is not known; say one of {', '.join(known)}, or give --timing FILE")
    return Hardware(model=model, device=device, timing_file=timing)


def _policies(text: str) -> tuple[str, ...]:
    from measure.simulate.replay import policy_names

    known = policy_names()
    if text.strip() == "all":
        return known
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise CliError(f"--policy: {unknown[0] if unknown else text!r} is no policy; known are {', '.join(known)}")
    return names


def _speeds(text: str) -> tuple[float, ...]:
    try:
        speeds = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        speeds = ()
    if not speeds or not all(0 < speed < float("inf") for speed in speeds):
        raise CliError(f"--speed: {text!r}; say positive numbers with commas between them, such as 0.5,1,2")
    return speeds
