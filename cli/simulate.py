"""`kvrelay simulate`: replays a trace under placement policies, in virtual time."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.console import Progress, err, print_wide, repeating
from cli.errors import CliError
from cli.options import options_from_dataclasses, positive_numbers

if TYPE_CHECKING:
    from measure.simulate.bound import Bound
    from measure.simulate.comparison import CellResult, PolicyComparison
    from measure.simulate.roofline import Hardware

_STEP_TOKENS_DISAGGREGATED = 8192
_STEP_TOKENS_AGGREGATED = 512
_TELL_REQUESTS_S = 5.0
_workload, _cluster, _signals, _run = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Workload", "Simulated cluster", "Routers and their signals", "Run")
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options for the requests that are replayed."""

    trace: Annotated[Path, _workload("--trace", "-t", help="Mooncake or a recording (.jsonl), Azure (.csv).")]
    speed: Annotated[str, _workload("--speed", "-s", metavar="X,Y,…", help="Speed-up of the arrivals.")] = "1"
    limit: Annotated[
        int | None, _workload("--limit", "-n", min=1, help="Number of requests from the beginning; default: all.")
    ] = None
    shrink: Annotated[int, _workload("--shrink", min=1, help="Divide all lengths by this.")] = 1
    ttft: Annotated[float, _workload("--ttft", min=0, metavar="SECONDS", help="Objective per 8192 prompt tokens.")] = (
        2.0
    )
    tpot: Annotated[
        float, _workload("--tpot", min=0, metavar="SECONDS", help="Objective for the mean gap of tokens.")
    ] = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options for the simulated workers."""

    workers: Annotated[str, _cluster("--workers", "-w", metavar="4P4D|8", help="Both pools, or one.")] = "4P4D"
    aggregated: Annotated[bool, _cluster("--aggregated", help="Put as many workers into one pool.")] = False
    blocks: Annotated[int, _cluster("--blocks", "-b", min=1, help="KV pages of a worker.")] = 3000
    block_size: Annotated[int, _cluster("--block-size", min=2, metavar="TOKENS", help="Tokens per page.")] = 512
    step_tokens: Annotated[
        int | None,
        _cluster(
            "--step-tokens",
            min=1,
            help=f"Budget of a step; default: {_STEP_TOKENS_DISAGGREGATED}, aggregated {_STEP_TOKENS_AGGREGATED}.",
            show_default=False,
        ),
    ] = None
    model: Annotated[str, _cluster("--model", "-m", help="llama-70b or qwen3-8b.")] = "llama-70b"
    device: Annotated[str, _cluster("--device", help="h100, h100-tp4 or h200-tp4.")] = "h100-tp4"
    timing: Annotated[
        Path | None,
        _cluster("--timing", metavar="FILE", help="Timings fitted on real workers, in place of --model and --device."),
    ] = None

    def pools(self) -> tuple[int, int]:
        """Return the sizes of the prefill and the decode pool. Raises CliError."""
        from measure.simulate.records import ClusterShape

        try:
            num_prefill, num_decode = ClusterShape.parse_workers(self.workers)
        except ValueError as error:
            raise CliError(f"--workers: {error}") from None
        return (0, num_prefill + num_decode) if self.aggregated else (num_prefill, num_decode)

    def max_step_tokens(self, *, num_prefill: int) -> int:
        """Return the budget of a step: as given, as in the timings, or the usual one of the pools."""
        from measure.simulate.timing import read_timing

        if self.step_tokens is not None:
            return self.step_tokens
        if self.timing is not None:
            return read_timing(self.timing)[0].max_step_tokens
        return _STEP_TOKENS_DISAGGREGATED if num_prefill else _STEP_TOKENS_AGGREGATED

    def hardware(self) -> "Hardware":
        """Return what the times of steps follow from. Raises CliError."""
        from measure.simulate.roofline import Hardware, Roofline, UnknownHardware

        try:
            Roofline.preset(self.model, self.device)
        except UnknownHardware as error:
            raise CliError(f"--{error}, or give --timing FILE") from None
        return Hardware(model=self.model, device=self.device, timing_file=self.timing)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalOptions:
    """Options for the routers, and what they know when."""

    routers: Annotated[int, _signals("--routers", min=1, help="Number of routers.")] = 1
    event_lag: Annotated[float, _signals("--event-lag", min=0, metavar="SECONDS", help="Extra latency of reports.")] = (
        0.02
    )
    report_interval: Annotated[
        float, _signals("--report-interval", min=0, metavar="SECONDS", help="Time between two reports.")
    ] = 0.1
    shed: Annotated[
        Literal["none", "deadline", "slo"],
        _signals("--shed", help="Refuse requests at once that will miss this."),
    ] = "deadline"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options for what is run, and where its results go."""

    out: Annotated[Path, _run("--out", "-o", metavar="DIR", help="Results.")]
    policy: Annotated[str, _run("--policy", "-p", metavar="A,B,…|all", help="Policies to compare.")] = "all"
    seed: Annotated[int, _run("--seed", min=0, help="Equal seeds give equal results.")] = 0
    jobs: Annotated[int, _run("--jobs", "-j", min=1, help="Number of runs at a time.")] = 1
    bound: Annotated[bool, _run("--bound", help="Show how much any policy could reach.")] = False
    again: Annotated[bool, _run("--again", help="Replace earlier results in the folder.")] = False


@options_from_dataclasses
def simulate(*, replay: ReplayOptions, workers: ClusterOptions, signals: SignalOptions, runs: RunOptions) -> None:
    """Replay a trace in virtual time, with real routers and workers and simulated work.

    \b
    kvrelay simulate -t conversation.jsonl --speed 0.5,1,2,3 --out results -j 2
    kvrelay simulate -t conversation.jsonl -p round_robin --aggregated --out one

    Each policy and speed is one run. Steps, copies and messages only take time;
    everything else is the code that serves. Prints a table and writes it to DIR
    with a page of plots (report.html) and every request. Finished runs are kept:
    the same command continues where it stopped.

    A good request is complete and within both objectives; refused requests count
    as failures. --bound computes for each speed how many requests could be good
    under any policy that knows the whole trace, and adds the share reached of it.
    """  # noqa: D301 - \b marks a preformatted block
    from common.slo import Slo
    from measure.simulate.comparison import PolicyComparison, ReplaySettings
    from measure.simulate.report import FORECASTS_NOTE, comparison_table, forecast_table, write_report

    num_prefill, num_decode = workers.pools()
    comparison = PolicyComparison(
        settings=ReplaySettings(
            trace=replay.trace,
            num_requests=replay.limit,
            shrink=replay.shrink,
            num_prefill=num_prefill,
            num_decode=num_decode,
            num_routers=signals.routers,
            num_blocks=workers.blocks,
            block_size=workers.block_size,
            max_step_tokens=workers.max_step_tokens(num_prefill=num_prefill),
            hardware=workers.hardware(),
            slo=Slo(ttft_s=replay.ttft, tpot_s=replay.tpot),
            shed=signals.shed,
            event_lag_s=signals.event_lag,
            report_interval_s=signals.report_interval,
            seed=runs.seed,
        ),
        policies=_policies(runs.policy),
        speeds=positive_numbers(replay.speed, option="--speed"),
        out=runs.out,
    )
    if runs.again:
        comparison.results.forget()
    results = _run_all(comparison, num_jobs=runs.jobs)
    bounds = _bounds(comparison) if runs.bound else {}
    page = write_report(comparison, results, bounds)
    print_wide(comparison_table(results, bounds))
    if (forecasts := forecast_table(results)) is not None:
        print_wide(forecasts)
        err.print(FORECASTS_NOTE, soft_wrap=True)
    err.print(f"The page is {page}", soft_wrap=True)


def _run_all(comparison: "PolicyComparison", *, num_jobs: int) -> "list[CellResult]":
    num_cells, num_done = len(comparison.cells), 0
    with Progress() as report:
        report(f"reading {comparison.settings.trace.name}")
        num_requests = comparison.prepare()
        report(f"{num_cells} runs, {num_requests:,} requests in all, {num_jobs} at a time")

        def tell(result: "CellResult") -> None:
            nonlocal num_done
            num_done += 1
            summary = result.summary
            report(
                f"[{num_done}/{num_cells}] {result.cell.policy} at speed {result.cell.speed:g}:"
                f" {summary.goodput_per_s:.2f} good requests/s, {summary.token_hit:.1%} hits;"
                f" took {result.clock.wall_s:.1f} s"
            )

        def tell_requests() -> None:
            report(f"[{num_done}/{num_cells}] {comparison.num_ended.value:,} of {num_requests:,} requests")

        with repeating(tell_requests, every_s=_TELL_REQUESTS_S):
            return comparison.run(num_jobs=num_jobs, report=tell)


def _bounds(comparison: "PolicyComparison") -> "dict[float, Bound]":
    from measure.simulate.bound import replay_bound

    bounds: dict[float, Bound] = {}
    with Progress() as report:
        for speed in comparison.speeds:
            report(f"bound at speed {speed:g}")
            bounds[speed] = replay_bound(comparison.settings, speed)
    return bounds


def _policies(text: str) -> tuple[str, ...]:
    from measure.simulate.comparison import policy_names

    known = policy_names()
    if text.strip() == "all":
        return known
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise CliError(f"--policy: {unknown[0] if unknown else text!r} is not a policy; known are {', '.join(known)}")
    return names
