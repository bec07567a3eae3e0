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
    from measure.workload.spec import RecordedSpec

_STEP_TOKENS_DISAGGREGATED = 8192
_STEP_TOKENS_AGGREGATED = 512
_workload, _sessions, _cluster, _signals, _run = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Workload", "Sessions", "Simulated cluster", "Routers and their signals", "Run")
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options for the requests that are replayed."""

    trace: Annotated[
        Path,
        _workload(
            "--trace", "-t", help="Mooncake or a recording (.jsonl), Azure (.csv), or sessions (docs/loadtest.md)."
        ),
    ]
    speed: Annotated[
        str, _workload("--speed", "-s", metavar="X,Y,…", help="Speed-up of the arrivals; of sessions, of their pauses.")
    ] = "1"
    limit: Annotated[
        int | None,
        _workload("--limit", "-n", min=1, help="Number of requests, or sessions, from the beginning; default: all."),
    ] = None
    shrink: Annotated[int, _workload("--shrink", min=1, help="Divide all lengths by this.")] = 1
    ttft: Annotated[float, _workload("--ttft", min=0, metavar="SECONDS", help="Objective per 8192 prompt tokens.")] = (
        2.0
    )
    tpot: Annotated[
        float, _workload("--tpot", min=0, metavar="SECONDS", help="Objective for the mean gap of tokens.")
    ] = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options for traces of sessions."""

    sessions: Annotated[
        str | None, _sessions("--sessions", metavar="N,M,…", help="Sessions at a time; each is a closed loop.")
    ] = None
    per_hour: Annotated[
        str | None, _sessions("--per-hour", metavar="X,Y,…", help="Sessions that begin in an hour, in place of these.")
    ] = None
    ramp: Annotated[
        float,
        _sessions("--ramp", min=0, max=1e9, metavar="SECONDS", help="Time in which the first of --sessions begin."),
    ] = 60.0
    turns: Annotated[int | None, _sessions("--turns", min=1, help="First requests of each session; default: all.")] = (
        None
    )
    longest: Annotated[
        int | None, _sessions("--longest", min=1, metavar="TOKENS", help="Leave out sessions with a longer prompt.")
    ] = None
    max_pause: Annotated[
        float | None, _sessions("--max-pause", min=0, metavar="SECONDS", help="Longest time of a tool or a person.")
    ] = None
    share_tools: Annotated[
        bool, _sessions("--share-tools", help="Let sessions with equal tools and system prompts begin alike.")
    ] = False
    stretch: Annotated[float, _sessions("--stretch", min=1, help="Stretch within which a session is good.")] = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options for the simulated workers."""

    workers: Annotated[str, _cluster("--workers", "-w", metavar="4P4D|8", help="Both pools, or one.")] = "4P4D"
    aggregated: Annotated[bool, _cluster("--aggregated", help="Put as many workers into one pool.")] = False
    blocks: Annotated[int, _cluster("--blocks", "-b", min=2, help="KV pages of a worker.")] = 3000
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
def simulate(
    *,
    replay: ReplayOptions,
    sessions: SessionOptions,
    workers: ClusterOptions,
    signals: SignalOptions,
    runs: RunOptions,
) -> None:
    """Replay a trace in virtual time, with real routers and workers and simulated work.

    \b
    kvrelay simulate -t conversation.jsonl --speed 0.5,1,2,3 --out results -j 2
    kvrelay simulate -t conversation.jsonl -p round_robin --aggregated --out one
    kvrelay simulate -t sessions.jsonl.gz --sessions 32,64,128 --block-size 64
    --blocks 24000 --longest 160000 --out agents

    Each policy and speed is one run. Steps, copies and messages only take time;
    everything else is the code that serves. Prints a table and writes it to DIR
    with a page of plots (report.html) and every request. Finished runs are kept:
    the same command continues where it stopped.

    A good request is complete and within both objectives; refused requests count
    as failures. --bound computes for each speed how many requests could be good
    under any policy that knows the whole trace, and adds the share reached of it.
    """  # noqa: D301 - \b marks a preformatted block
    from measure.experiment.replay import ReplayedTrace, replay_bound
    from measure.experiment.replay_tables import FORECASTS_NOTE, forecast_table, replay_table
    from measure.experiment.report import findings_of, write_report
    from measure.experiment.session_page import session_table
    from measure.experiment.simulated import SimulatedBench
    from measure.experiment.store import Store
    from measure.load.tables import terminal_table
    from measure.simulate.store import write_json

    replayed, store = _replay(replay, sessions, workers, signals, runs), Store(runs.out)
    workloads = replayed.workloads()
    if runs.bound and not isinstance(workloads, ReplayedTrace):
        raise CliError("--bound is for traces: what arrives when depends on the answers of a session")
    experiment = replayed.experiment_of(workloads)
    labels = {load: workloads.label(load) for load in experiment.spec.loads}
    if runs.again:
        store.forget()
    store.claim(experiment.fingerprint())
    bench = SimulatedBench(experiment.spec, experiment.workloads)
    is_complete = measure_missing(experiment, store, lambda _report: bench, num_jobs=runs.jobs)
    bounds = {}
    if runs.bound and isinstance(workloads, ReplayedTrace):
        with Progress() as report:
            for load, label in labels.items():
                report(f"bound at speed {label}")
                bounds[load] = replay_bound(replayed.experiment_of(workloads), load)
        by_speed = {labels[load].rstrip("×"): dataclasses.asdict(bound) for load, bound in bounds.items()}
        write_json(runs.out / "bounds.json", by_speed)
    points = [point for cell in experiment.cells if (point := store.point(experiment.source, cell)) is not None]
    if isinstance(workloads, ReplayedTrace):
        table = replay_table(points, store, labels=labels, bounds=bounds)
    else:
        table = terminal_table(session_table([point for point in points if point.sessions is not None]))
    print_wide(table)
    if (forecasts := forecast_table(points, labels)) is not None:
        print_wide(forecasts)
        err.print(FORECASTS_NOTE, soft_wrap=True)
    with (runs.out / "table.txt").open("w", encoding="utf-8") as file:
        print_wide(table, file=file)
    err.print(f"The page is {write_report(store, findings_of(store))}", soft_wrap=True)
    if not is_complete:
        raise typer.Exit(EXIT_FAILURE)


def _replay(
    replay: ReplayOptions,
    sessions: SessionOptions,
    workers: ClusterOptions,
    signals: SignalOptions,
    runs: RunOptions,
) -> "Replay":
    from common.config import parse_config
    from measure.experiment.points import LoadUnit
    from measure.experiment.replay import Replay
    from measure.workload.spec import MAX_PLACES

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
    recorded, loads = _recorded(replay, sessions), positive_numbers(replay.speed, option="--speed")
    unit = LoadUnit.REQUESTS
    if recorded is not None:
        unit = LoadUnit.SESSIONS_PER_HOUR if sessions.per_hour is not None else LoadUnit.SESSIONS
        option = "--sessions" if sessions.per_hour is None else "--per-hour"
        loads = positive_numbers(sessions.per_hour or sessions.sessions or "1", option=option)
        if unit is LoadUnit.SESSIONS and any(load % 1 or load > MAX_PLACES for load in loads):
            raise CliError(f"--sessions: {sessions.sessions!r}; say whole numbers up to {MAX_PLACES:,}")
    return Replay(
        trace=replay.trace,
        num_requests=replay.limit,
        shrink=replay.shrink,
        loads=loads,
        recorded=recorded,
        load_unit=unit,
        ramp_s=sessions.ramp,
        stretch=sessions.stretch,
        policies=_policies(runs.policy),
        serving=parse_config(serving, source="kvrelay simulate"),
        simulate=workers.simulated(signals),
        seed=runs.seed,
    )


def _recorded(replay: ReplayOptions, sessions: SessionOptions) -> "RecordedSpec | None":
    """Return the sessions that are replayed; None for any other trace. Raises CliError."""
    from measure.workload.session_files import is_session_trace
    from measure.workload.spec import RecordedSpec

    if not is_session_trace(replay.trace):
        if sessions != SessionOptions():
            raise CliError(f"{replay.trace} has no sessions: leave out the options for them, such as --sessions")
        return None
    if (sessions.sessions is None) == (sessions.per_hour is None):
        raise CliError("give one of --sessions N, how many sessions run at a time, and --per-hour X, how many begin")
    speeds = positive_numbers(replay.speed, option="--speed")
    if len(speeds) > 1:
        raise CliError("--speed divides the pauses of sessions, and is one number; loads are --sessions or --per-hour")
    return RecordedSpec(
        path=replay.trace,
        shrink=replay.shrink,
        speed=speeds[0],
        max_pause_s=sessions.max_pause,
        limit=replay.limit,
        longest=sessions.longest,
        turns=sessions.turns,
        shares_tools=sessions.share_tools,
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
