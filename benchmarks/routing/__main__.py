"""The command line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks.routing as this
from benchmarks.routing.cells import PARTS, Bench
from benchmarks.routing.tenants import LOUDNESS
from measure.simulate.comparison import ReplayError
from measure.simulate.store import OtherSettings
from measure.workload.traces import TraceError

_FEWEST_REQUESTS = 2 * (1 + LOUDNESS)
"""Requests that leave two to the quiet tenant."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing", description=this.__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="mooncake_conversation.jsonl")
    parser.add_argument("--requests", type=int, default=1500, help="number of requests from the trace's beginning")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, in this order")
    parser.add_argument("--out", type=Path, default=Path("bench-results/routing"), help="folder of the results")
    args = parser.parse_args(argv)
    parts = [part for part in args.parts.split(",") if part]
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: {unknown[0]!r} is not a part; known are {', '.join(PARTS)}")
    if args.requests < _FEWEST_REQUESTS:
        parser.error(f"--requests: {args.requests} are too few for two tenants; say at least {_FEWEST_REQUESTS}")
    bench = Bench(trace=args.trace, num_requests=args.requests, num_jobs=args.jobs, out=args.out)
    try:
        for part in parts:
            PARTS[part](bench)
    except OtherSettings:
        sys.exit(f"{args.out} holds results of other settings; name another folder with --out")
    except (TraceError, ReplayError, OSError) as error:
        sys.exit(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
