"""`kvrelay simulate`: replays a trace under placement policies, in virtual time."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.console import Progress, err, print_wide
from cli.errors import EXIT_FAILURE, CliError
from cli.experiment import measure_missing
from cli.options import options_from_dataclasses, positive_numbers

if TYPE_CHECKING:
    from measure.experiment.replay import Replay
    from measure.experiment.spec import SimulateSpec, TierSpec

_STEP_TOKENS_DISAGGREGATED = 8192
_STEP_TOKENS_AGGREGATED = 512
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

    tiers: Annotated[
        str,
        _cluster("--tiers", metavar="GIB@GB/S,…", help="Tiers of a worker: their sizes, and rates of reads."),
    ] = ""

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

    def simulated(self, signals: "SignalOptions") -> "SimulateSpec":
        """Return what the times of steps and reports follow from. Raises CliError."""
        from measure.experiment.spec import SimulateSpec
        from measure.simulate.roofline import Roofline, UnknownHardware

        try:
            Roofline.preset(self.model, self.device)
        except UnknownHardware as error:
            raise CliError(f"--{error}, or give --timing FILE") from None
        return SimulateSpec(
            model=self.model,
            device=self.device,
            timing=self.timing,
            tiers=tuple(map(_tier, filter(None, self.tiers.split(",")))),
            report_interval_s=signals.report_interval,
            event_lag_s=signals.event_lag,
        )


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
    from measure.experiment.replay import replay_bound
    from measure.experiment.replay_tables import FORECASTS_NOTE, forecast_table, replay_table
    from measure.experiment.report import findings_of, write_report
    from measure.experiment.simulated import SimulatedBench
    from measure.experiment.store import Store
    from measure.simulate.store import write_json

    replayed, store = _replay(replay, workers, signals, runs), Store(runs.out)
    experiment = replayed.experiment()
    speeds = dict(zip(experiment.spec.loads, replayed.speeds, strict=True))
    if runs.again:
        store.forget()
    store.claim(experiment.fingerprint())
    bench = SimulatedBench(experiment.spec, experiment.workloads)
    is_complete = measure_missing(experiment, store, lambda _report: bench, num_jobs=runs.jobs)
    bounds = {}
    if runs.bound:
        with Progress() as report:
            for load, speed in speeds.items():
                report(f"bound at speed {speed:g}")
                bounds[load] = replay_bound(experiment, load)
        by_speed = {f"{speeds[load]:g}": dataclasses.asdict(bound) for load, bound in bounds.items()}
        write_json(runs.out / "bounds.json", by_speed)
    points = [point for cell in experiment.cells if (point := store.point(experiment.source, cell)) is not None]
    table = replay_table(points, store, speeds=speeds, bounds=bounds)
    print_wide(table)
    if (forecasts := forecast_table(points, speeds)) is not None:
        print_wide(forecasts)
        err.print(FORECASTS_NOTE, soft_wrap=True)
    with (runs.out / "table.txt").open("w", encoding="utf-8") as file:
        print_wide(table, file=file)
    err.print(f"The page is {write_report(store, findings_of(store))}", soft_wrap=True)
    if not is_complete:
        raise typer.Exit(EXIT_FAILURE)


def _replay(replay: ReplayOptions, workers: ClusterOptions, signals: SignalOptions, runs: RunOptions) -> "Replay":
    from common.config import parse_config
    from measure.experiment.replay import Replay

    num_prefill, num_decode = workers.pools()
    pool = {
        "block_size": workers.block_size,
        "num_blocks": workers.blocks,
        "max_step_tokens": workers.max_step_tokens(num_prefill=num_prefill),
        "max_running": 256,
        "max_waiting": 4096,
    }
    serving = {
        "launcher": "local",
        "slo": {"ttft_s": replay.ttft, "tpot_s": replay.tpot},
        "router": {"count": signals.routers, "shed": signals.shed},
        "pools": {"prefill": pool | {"count": num_prefill}, "decode": pool | {"count": num_decode}},
    }
    return Replay(
        trace=replay.trace,
        num_requests=replay.limit,
        shrink=replay.shrink,
        speeds=positive_numbers(replay.speed, option="--speed"),
        policies=_policies(runs.policy),
        serving=parse_config(serving, source="kvrelay simulate"),
        simulate=workers.simulated(signals),
        seed=runs.seed,
    )


def _tier(text: str) -> "TierSpec":
    from measure.experiment.spec import TierSpec

    gib, _, gb_per_s = text.partition("@")
    try:
        return TierSpec(gib=float(gib), gb_per_s=float(gb_per_s))
    except ValueError:
        raise CliError(f"--tiers: {text!r} is not GiB@GB/s, such as 512@20") from None


def _policies(text: str) -> tuple[str, ...]:
    from measure.simulate.routers import policy_names

    known = policy_names()
    if text.strip() == "all":
        return known
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise CliError(f"--policy: {unknown[0] if unknown else text!r} is not a policy; known are {', '.join(known)}")
    return names
