"""The command line: serves the wave with each arm, keeps the results, writes the table."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import benchmarks.planner as this
from benchmarks.planner.arms import Arm, ArmError, parse_arm
from benchmarks.planner.outcome import Outcome, markdown_table, outcome_of
from common.slo import Slo
from measure.simulate.cluster import run
from measure.simulate.comparison import trace_arrivals
from measure.simulate.records import ClusterShape, Elasticity, NetworkShape, SimSettings
from measure.simulate.roofline import Hardware
from measure.simulate.store import OtherSettings, ResultFolder
from measure.workload.traces import Trace, TraceError, read_trace
from measure.workload.waves import Day, over_a_day, repeated

SLO = Slo(ttft_s=2.0, tpot_s=0.05)
_STEP_TOKENS = 2048
_INTERVAL_S = 15.0


def simulate(trace: Trace, arm: Arm, *, day: Day) -> Outcome:
    """Serve the wave with one arm; takes minutes. Needs a thread without a running loop."""
    pace, link, kv_bytes_per_token = Hardware().pace(_STEP_TOKENS)
    elasticity = None
    if arm.make_planner is not None:
        elasticity = Elasticity(
            make_planner=arm.make_planner,
            slo=SLO,
            interval_s=_INTERVAL_S,
            startup_s=arm.startup_s,
            flip_s=arm.flip_s,
        )
    shape = ClusterShape(
        num_prefill=arm.first.prefill,
        num_decode=arm.first.decode,
        block_bytes=512 * kv_bytes_per_token,
        max_step_tokens=_STEP_TOKENS,
    )
    settings = SimSettings(
        prefill=pace,
        decode=pace,
        network=NetworkShape(kv_bytes_per_s=link.bytes_per_s),
        event_lag_s=0.02,
        tpot_slo_s=SLO.tpot_s,
        elasticity=elasticity,
    )
    return outcome_of(run(shape, settings, trace_arrivals(trace, slo=SLO)), arm=arm, slo=SLO, day_s=day.length_s)


def _settings(args: argparse.Namespace) -> dict[str, object]:
    return {
        "trace": Path(args.trace).name,
        "requests": args.requests,
        "plays": args.plays,
        "hours": args.hours,
        "interval_s": _INTERVAL_S,
        "slo": asdict(SLO),
    }


def read_outcomes(out: Path) -> list[Outcome]:
    """Return the finished arms of a folder, fixed splits first, by GPU-hours."""
    paths = (out / "arms").glob("*.json")
    outcomes = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return sorted(outcomes, key=lambda outcome: (outcome.kind_order, outcome.gpu_hours, outcome.name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing arms, then write the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner", description=this.__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="mooncake_conversation.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--arms", default="", help="comma-separated; without any, only the table is written")
    parser.add_argument("--hours", type=float, default=1.5, help="simulated hours of a day")
    parser.add_argument("--plays", type=int, default=1, help="number of times that the trace is played in a day")
    parser.add_argument("--requests", type=int, default=None, help="only the first requests of the trace")
    parser.add_argument("--goal", type=float, default=0.98, help="share of good requests that holds the objectives")
    args = parser.parse_args(argv)
    try:
        arms = [parse_arm(text, slo=SLO, interval_s=_INTERVAL_S) for text in args.arms.split(",") if text]
        trace = read_trace(args.trace)
        if args.requests is not None:
            trace = trace.first(args.requests)
        day = Day(length_s=3600 * args.hours)
        trace = over_a_day(repeated(trace, args.plays), day)
    except (ArmError, TraceError, OSError) as error:
        sys.exit(str(error))
    try:
        ResultFolder(args.out).claim(_settings(args))
    except OtherSettings:
        sys.exit(f"{args.out} holds results of other settings; name another folder with --out")
    (args.out / "arms").mkdir(exist_ok=True)
    for arm in arms:
        path = args.out / "arms" / f"{arm.file_name}.json"
        if not path.exists():
            outcome = simulate(trace, arm, day=day)
            path.write_text(json.dumps(asdict(outcome)) + "\n", encoding="utf-8")
            print(f"{outcome.line} ({outcome.wall_s:.0f} s)", flush=True)
    table = args.out / "table.md"
    table.write_text(markdown_table(read_outcomes(args.out), goal=args.goal), encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
