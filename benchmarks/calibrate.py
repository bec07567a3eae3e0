"""Does the simulator tell the time? A trace replayed on real workers and, with what these report, in virtual time.

    python -m benchmarks.calibrate --trace tests/data/small.jsonl [--load 0.5] [--rounds 3] [--json FILE]

Method. 1P+1D of the default model (launcher local, processes and generator on this machine's cores) serves the first
requests of the trace, lengths divided by `--shrink`: a warm-up, then rounds with prompts of other tokens, so that each
finds cold caches and the same prefixes to share. Arrivals never wait for answers. The warm-up's timing models choose
the speed at which the prefill worker is busy `--load` of the time.

Then the simulator replays the same arrivals on workers of the same pages and step budget, whose steps and pulls take
what the workers' own models say at the end of the rounds (`WatchWorker`). The comparison is of the medians of TTFT,
from the scheduled arrival to the first token at the client, and of each request's mean gap between tokens; the real
rounds count with the median of their medians, with the range. A ratio of 1 is a perfect simulation.
"""

import argparse
import asyncio
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from cluster.lifecycle import ClusterInfo
from cluster.trust import reach_of
from common.config import RouterConfig, ServingConfig
from common.slo import Slo
from common.timing import LinkModel
from kvrelay.client import AsyncClient
from measure.experiment.real import MeasuredWorker, ask_worker
from measure.figures import summarize
from measure.load.records import RequestRecord
from measure.load.run import run_load
from measure.load.spec import LoadSpec
from measure.load.targets.interface import TargetSpec
from measure.simulate.cluster import run
from measure.simulate.records import Arrival, ClusterShape, NetworkShape, SimSettings
from measure.simulate.timing import FittedTimes, WorkerSpeed
from measure.workload.build import build_workload
from measure.workload.content import ContentWriter
from measure.workload.spec import parse_workload
from measure.workload.traces import Trace, read_trace

MESSAGE_LATENCY_S = 1e-3
"""One way, Python to Python over loopback, with the loops' own work."""


def main() -> None:
    """Measure, simulate, compare."""
    parser = command_line("calibrate", __doc__, rounds=3)
    parser.add_argument("--trace", type=Path, required=True, help="a trace in Mooncake's format")
    parser.add_argument("--requests", type=int, default=80, help="requests that are replayed (default 80)")
    parser.add_argument("--shrink", type=int, default=32, help="divisor of all lengths (default 32)")
    parser.add_argument("--load", type=float, default=0.5, help="share of time that prefill is busy (default 0.5)")
    args = parser.parse_args()
    console, figures = terminal(), Figures()
    trace = read_trace(args.trace).first(args.requests).shrunk(args.shrink)
    with running_doors(launcher="local", console=console) as (info, config):
        rounds, workers, speed = asyncio.run(_measure(info, args, trace, console))
    trace = trace.faster(speed)
    simulated = _simulate(trace, workers, config)
    for arm, each in (*(("real", times) for times in rounds), ("simulated", simulated)):
        figures.add("medians", trace.name, arm, **_medians_ms(each))
    figures.show(console)
    for name, value_ms in _medians_ms(simulated).items():
        real_ms = statistics.median(_medians_ms(each)[name] for each in rounds)
        console.print(f"{name}: simulated / real is {value_ms / real_ms:.2f}")
    for name, worker in workers.items():
        console.print(f"{name}: {worker.timing}")
    write_figures(
        args.json,
        figures,
        method="benchmarks/calibrate.py",
        num_requests=len(trace.requests),
        duration_s=trace.duration_s,
        workers={name: repr(worker) for name, worker in workers.items()},
        real=[_times(each) for each in rounds],
        simulated=_times(simulated),
    )


def _medians_ms(requests: Iterable[RequestRecord]) -> dict[str, float]:
    figures = summarize(list(requests), slo=Slo(ttft_s=math.inf, tpot_s=math.inf))
    assert figures.num_complete == figures.num_requests, f"{figures.num_not_complete} requests were not answered"
    assert figures.ttft is not None and figures.tpot is not None, "answers have more than one token"
    return {"TTFT_ms": 1000 * figures.ttft.p50, "TPOT_ms": 1000 * figures.tpot.p50}


def _times(requests: Iterable[RequestRecord]) -> list[dict[str, float | None]]:
    return [{"ttft_s": request.ttft_s, "tpot_s": request.tpot_s} for request in requests]


# Real workers.


async def _measure(
    info: ClusterInfo, args: argparse.Namespace, trace: Trace, console: Console
) -> tuple[list[Sequence[RequestRecord]], dict[str, MeasuredWorker], float]:
    """Return the rounds' requests, the workers at the end, and the speed that was chosen."""
    connect = reach_of(info.run_dir).worker
    async with AsyncClient(info.address, tls=info.tls) as client:
        addresses = {view.role: view.address for view in (await client.status()).workers}
    await _replay(info, args, limit=min(30, args.requests), speed=0.5, seed=0)
    timing = (await ask_worker(addresses["prefill"], connect)).timing
    busy_s = sum(timing.prefill_s(request.num_prompt_tokens, 0) for request in trace.requests)
    speed = args.load * trace.duration_s / busy_s
    console.print(f"speed {speed:.2f}: {len(trace.requests)} requests in {trace.duration_s / speed:.0f} s")
    rounds = []
    for number in range(1, args.rounds + 1):
        rounds.append(await _replay(info, args, limit=args.requests, speed=speed, seed=number))
        console.print(f"round {number}: {_medians_ms(rounds[-1])}")
    return rounds, {role: await ask_worker(at, connect) for role, at in addresses.items()}, speed


async def _replay(
    info: ClusterInfo, args: argparse.Namespace, *, limit: int, speed: float, seed: int
) -> Sequence[RequestRecord]:
    """Send the trace as `kvrelay bench` does, with contents of the seed's own; returns the requests."""
    asked = {"path": str(args.trace.resolve()), "limit": limit, "shrink": args.shrink, "speed": speed}
    workload = parse_workload({"streams": [{"name": "trace", "trace": asked}]}, source="calibrate")
    target = TargetSpec(url=info.address, tls=info.tls)
    spec = LoadSpec(name=f"round {seed}", target=target, workload=build_workload(workload, seed=seed))
    return (await run_load(spec)).requests


# The simulator.


def _simulate(trace: Trace, workers: dict[str, MeasuredWorker], config: ServingConfig) -> Sequence[RequestRecord]:
    """Return the same requests, served in virtual time."""
    prefill, decode = workers["prefill"], workers["decode"]
    pool = config.pools.decode
    shape = ClusterShape(
        num_prefill=1,
        num_decode=1,
        num_blocks=decode.num_blocks,
        block_size=pool.block_size,
        block_bytes=decode.block_bytes,
        max_step_tokens=pool.max_step_tokens,
        max_running=pool.max_running,
        max_waiting=pool.max_waiting,
    )
    link = decode.timing.links.get(None, LinkModel(latency_s=0.0, bytes_per_s=1e9))
    settings = SimSettings(
        prefill=WorkerSpeed(times=FittedTimes(prefill.timing)),
        decode=WorkerSpeed(times=FittedTimes(decode.timing)),
        network=NetworkShape(latency_s=MESSAGE_LATENCY_S, kv_bytes_per_s=link.bytes_per_s),
        router=RouterConfig(policy=config.router.policy),
        report_interval_s=0.02,
    )
    writer = ContentWriter(seed=1)
    arrivals = (
        Arrival(
            at_s=request.arrival_s,
            prompt=writer.tokens(trace.segments(request)),
            num_output_tokens=request.num_output_tokens,
        )
        for request in trace.requests
    )
    return run(shape, settings, arrivals).requests


if __name__ == "__main__":
    main()
