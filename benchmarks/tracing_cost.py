"""Cost of tracing: `python -m benchmarks.tracing_cost [--rounds N] [--json results/tracing.json]`.

Method. Two clusters of real processes (launcher local, one prefill and one decode worker on fake engines without a
step time, which leave the cost of everything else), both up for the whole run. `off` has no `tracing.endpoint`. The
other one sends its spans to a collector in a process of its own that only keeps them, and takes three arms in turns,
without a restart between them: `0 %`, `10 %` and `100 %` of the requests carry a `traceparent` with the sampled flag
(`sample_rate: 0`, no limit for clients), the others one without it. Rounds alternate: the order of the arms is reversed
in every other one; a warm-up round is dropped. The round of an arm is a closed loop of requests at the HTTP door,
streamed, prompts of 200 new tokens that are handed over, 32 output tokens.

Reported for each arm: CPU time of router and workers per request, from the kernel, including what the exporting
threads do in the second after the last answer (batches leave every half second); requests per second, which includes
the CPU that the collector takes on the same machine; and spans per traced request, which shows that none was dropped.
Ratios are those of the same round to `0 %`, which has the same processes, and to `off`.
"""

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import aiohttp
import psutil
import uvloop

from benchmarks.answers import closed_loop
from benchmarks.clusters import ONE_THREAD_EACH, running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, in_turn, spread
from benchmarks.loopback import open_here
from cluster.lifecycle import ClusterInfo

OFF, NONE, SOME, ALL = "off", "0 %", "10 %", "100 %"
SHARES = {OFF: 0.0, NONE: 0.0, SOME: 0.1, ALL: 1.0}
"""Share of traced requests by arm."""
CONCURRENCY = 8
_PROMPT_TOKENS, _OUTPUT_TOKENS = 200, 32
_SETTLE_S = 1.0
_BATCH_DELAY_MS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A cluster as an arm uses it."""

    url: str
    processes: Sequence[psutil.Process]
    """Router and workers."""
    share: float

    def cpu_s(self) -> float:
        """Return the CPU time of its processes so far."""
        times = [process.cpu_times() for process in self.processes]
        return sum(each.user + each.system for each in times)


@contextmanager
def running_sink() -> Iterator[str]:
    """Run a collector in a process of its own; yields its URL."""
    command = [sys.executable, "-P", "-m", "benchmarks.otlp_collector"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def start(stack: ExitStack, endpoint: str | None) -> ClusterInfo:
    """Run a cluster until the stack is left, whose clients decide which requests are traced."""
    info, _config = stack.enter_context(
        running_doors(
            launcher="local",
            console=terminal(stderr=True),
            model={"engine": "fake", "max_model_len": 4096},
            pools=ONE_THREAD_EACH,
            router={"http_port": 0, "local_prefill_max_tokens": 0},
            tracing={"endpoint": endpoint, "sample_rate": 0.0, "client_traces_per_min": 10**9},
        )
    )
    return info


def arm_of(info: ClusterInfo, share: float) -> Arm:
    """Return an arm of a running cluster."""
    return Arm(
        url=f"http://{info.http_address}/v1/completions",
        processes=psutil.Process(info.pid).children(recursive=True),
        share=share,
    )


def is_traced(number: int, share: float) -> bool:
    """Return whether request `number` of a round is traced: evenly spread over the round."""
    return int((number + 1) * share) > int(number * share)


async def run_round(arm: Arm, *, seed: str, num_requests: int) -> dict[str, float]:
    """Return the figures of one round, but for its spans."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(32, 127), k=_PROMPT_TOKENS) for _ in range(num_requests)]
    before_s, started_s = arm.cpu_s(), time.perf_counter()
    async with aiohttp.ClientSession() as session:

        async def ask(number: int) -> None:
            flag = int(is_traced(number, arm.share))
            traceparent = f"00-{rng.getrandbits(127) + 1:032x}-{rng.getrandbits(63) + 1:016x}-{flag:02x}"
            body = {"prompt": prompts[number], "max_tokens": _OUTPUT_TOKENS, "temperature": 0, "stream": True}
            body |= {"ignore_eos": True}
            async with session.post(arm.url, json=body, headers={"traceparent": traceparent}) as response:
                response.raise_for_status()
                await response.read()

        await closed_loop(ask, range(num_requests), concurrency=CONCURRENCY)
    elapsed_s = time.perf_counter() - started_s
    await asyncio.sleep(_SETTLE_S)
    used_s = arm.cpu_s() - before_s
    return {"CPU_ms_per_request": used_s / num_requests * 1e3, "requests_per_s": num_requests / elapsed_s}


def num_spans(sink: str) -> int:
    """Return how many spans a collector has received."""
    with open_here(f"{sink}/spans", timeout=60) as answer:
        return int(answer.read())


async def measure(figures: Figures, arms: dict[str, Arm], sink: str, *, num_rounds: int, num_requests: int) -> None:
    """Run all rounds of all arms."""
    names = list(arms)
    for number in range(num_rounds + 1):
        for name in in_turn(names, number):
            arm, before = arms[name], num_spans(sink)
            found = await run_round(arm, seed=f"{number}/{name}", num_requests=num_requests)
            traced = sum(is_traced(each, arm.share) for each in range(num_requests))
            if traced:
                found["spans_per_traced_request"] = (num_spans(sink) - before) / traced
            if number:
                figures.add("tracing", "fake engines, HTTP", name, **found)


def ratios(figures: Figures) -> dict[str, list[float]]:
    """Return each arm's ratios to the other ones of the same rounds, by arm, unit and base."""
    pairs = itertools.product(figures.all.values(), (OFF, NONE))
    found = {f"{figure.arm}, {figure.unit} / {base}": figures.ratios(figure, base) for figure, base in pairs}
    return {name: values for name, values in found.items() if values}


def main() -> None:
    """Measure and report."""
    parser = command_line("tracing_cost", __doc__, rounds=12)
    parser.add_argument("--requests", type=int, default=400, help="requests of an arm in a round (default 400)")
    args = parser.parse_args()
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = str(_BATCH_DELAY_MS)
    console, figures = terminal(), Figures()
    with ExitStack() as stack:
        sink = stack.enter_context(running_sink())
        plain, traced = start(stack, None), start(stack, sink)
        arms = {name: arm_of(plain if name == OFF else traced, share) for name, share in SHARES.items()}
        uvloop.run(measure(figures, arms, sink, num_rounds=args.rounds, num_requests=args.requests))
    figures.show(console)
    for name, values in ratios(figures).items():
        console.print(f"{name}: {spread(values, percentiles=(25, 75))}")
    write_figures(args.json, figures, method="benchmarks/tracing_cost.py", ratios=ratios(figures))


if __name__ == "__main__":
    main()
