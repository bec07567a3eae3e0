"""Does the simulator tell the time? A trace replayed on real workers and, with what these report, in virtual time.

    python -m benchmarks.calibrate --trace tests/data/small.jsonl [--load 0.5] [--rounds 3] [--json FILE]

Method. 1P+1D of the default model (launcher local, processes and client on this machine's cores) serves the first
requests of the trace, lengths divided by `--shrink`: a warm-up, then rounds with prompts of other tokens, so that each
finds cold caches and the same prefixes to share. Arrivals never wait for answers. The warm-up's timing models choose
the speed at which the prefill worker is busy `--load` of the time.

Then the simulator replays the same arrivals on workers of the same pages and step budget, whose steps and pulls take
what the workers' own models say at the end of the rounds (`WatchWorker`). Compared are medians of TTFT, from the
scheduled arrival to the first token at the client, and of each request's mean gap between tokens; of the real rounds
the median of the rounds' medians, with their range. A ratio of 1 is a perfect simulation.
"""

import asyncio
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.answers import read
from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from cluster.lifecycle import ClusterInfo
from cluster.trust import reach_of
from common.config import RouterConfig, ServingConfig
from common.timing import LinkModel, TimingModel
from common.tokens import TokenArray
from kvrelay.client import AsyncClient
from measure.experiment.worker_facts import MeasuredWorker, ask_worker
from measure.simulate.cluster import run
from measure.simulate.records import Arrival, ClusterShape, NetworkShape, SimSettings
from measure.simulate.timing import FittedTimes, WorkerSpeed
from measure.workload.content import ContentWriter
from measure.workload.traces import Trace, TraceRequest, read_trace

FIRST_TOKEN, NUM_TOKENS = 1000, 40_000
"""Ordinary tokens of the default model's vocabulary."""
MESSAGE_LATENCY_S = 1e-3
"""One way, Python to Python over loopback, with the loops' own work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Outcome of one request."""

    ttft_s: float
    itl_s: float | None
    """Mean; None with a single token."""


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
        rounds, workers, trace = asyncio.run(_measure(info, trace, args.load, args.rounds, console))
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
        real=[[asdict(times) for times in each] for each in rounds],
        simulated=[asdict(times) for times in simulated],
    )


def _medians_ms(times: Sequence[Times]) -> dict[str, float]:
    return {"TTFT_ms": 1000 * _median(t.ttft_s for t in times), "ITL_ms": 1000 * _median(t.itl_s for t in times)}


def _median(values: Iterable[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


# Real workers.


async def _measure(
    info: ClusterInfo, trace: Trace, load: float, num_rounds: int, console: Console
) -> tuple[list[list[Times]], dict[str, MeasuredWorker], Trace]:
    """Return the rounds' times, the workers at the end, and the trace at the speed that was chosen."""
    connect = reach_of(info.run_dir).worker
    async with AsyncClient(info.address, timeout_s=300, tls=info.tls) as client:
        addresses = {view.role: view.address for view in (await client.status()).workers}
        await _replay(client, trace.first(30).faster(0.5), number=0)
        before = await ask_worker(addresses["prefill"], connect)
        speed = load * trace.duration_s / sum(_prefill_s(before.timing, request) for request in trace.requests)
        trace = trace.faster(speed)
        console.print(f"speed {speed:.2f}: {len(trace.requests)} requests in {trace.duration_s:.0f} s")
        rounds = []
        for number in range(1, num_rounds + 1):
            rounds.append(await _replay(client, trace, number=number))
            console.print(f"round {number}: median TTFT {_median(t.ttft_s for t in rounds[-1]) * 1000:.0f} ms")
        return rounds, {role: await ask_worker(at, connect) for role, at in addresses.items()}, trace


def _prefill_s(timing: TimingModel, request: TraceRequest) -> float:
    return timing.prefill_s(request.num_prompt_tokens, 0)


async def _replay(client: AsyncClient, trace: Trace, *, number: int) -> list[Times]:
    start_s = time.perf_counter() + 0.5
    prompts = _prompts(trace, number)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_serve(client, request, prompt, start_s + request.arrival_s))
            for request, prompt in zip(trace.requests, prompts, strict=True)
        ]
    return [task.result() for task in tasks]


async def _serve(client: AsyncClient, request: TraceRequest, prompt: TokenArray, at_s: float) -> Times:
    await asyncio.sleep(at_s - time.perf_counter())
    stream = client.stream(prompt.tolist(), max_tokens=request.num_output_tokens, ignore_eos=True, temperature=0.0)
    answer = await read(stream, sent_s=at_s)
    assert answer.generation, "every request is answered"
    return Times(ttft_s=answer.ttft_s, itl_s=answer.mean_gap_s)


# The simulator.


def _simulate(trace: Trace, workers: dict[str, MeasuredWorker], config: ServingConfig) -> list[Times]:
    """Return the same requests' times in virtual time."""
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
    arrivals = (
        Arrival(at_s=request.arrival_s, prompt=prompt, num_output_tokens=request.num_output_tokens)
        for request, prompt in zip(trace.requests, _prompts(trace, 1), strict=True)
    )
    requests = run(shape, settings, arrivals).requests
    refused = [request.error for request in requests if not request.is_complete]
    assert not refused, f"the simulated workers refused: {refused[0]}"
    return [Times(ttft_s=request.ttft_s or 0.0, itl_s=request.tpot_s) for request in requests]


def _prompts(trace: Trace, number: int) -> list[TokenArray]:
    """Return the trace's prompts with contents of the round's own: nothing is cached from the round before."""
    writer = ContentWriter(seed=number, first_token=FIRST_TOKEN, num_tokens=NUM_TOKENS)
    return [writer.tokens(trace.segments(request)) for request in trace.requests]


if __name__ == "__main__":
    main()
