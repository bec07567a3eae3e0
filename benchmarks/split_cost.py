"""Measures what the split costs: TTFT and ITL of a 1P+1D cluster beside the same engine in one process.

    python -m benchmarks.split_cost [--rounds 5] [--json FILE]

Method. One run holds all arms in memory and alternates them, round by round: (a) `cluster`: router, prefill worker
and decode worker as processes, one CPU thread per worker, over gRPC, KV through shared memory; (b) `in-process`: the
engine alone in this process with one thread; (c) the same with all cores. A round sends 1 and then 8 concurrent
requests of 256 prompt tokens and 32 output tokens, greedy, every prompt new, so that nothing is cached. The first round
warms up and is dropped. Reported: median over rounds of the mean TTFT and mean ITL of a round's requests, with the
range, and the median ratio to in-process with one thread. All arms and the client share the machine's cores; the idle
arm computes nothing.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.clusters import running_doors
from cluster.lifecycle import ClusterInfo
from common.sampling import SamplingParams
from kvrelay.client import AsyncClient, Token
from worker.inprocess import LocalEngine

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 32
CONCURRENCIES = (1, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One arm's round at one concurrency."""

    arm: str
    concurrency: int
    round_idx: int
    ttft_s: float
    """Mean over the requests."""
    itl_s: float
    """Mean over the requests' mean gaps."""
    total_s: float


def _prompts(rng: random.Random, count: int, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(100, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _summary(stamps: dict[int, list[float]], started_s: float) -> tuple[float, float]:
    ttft = statistics.mean(times[0] - started_s for times in stamps.values())
    itl = statistics.mean((times[-1] - times[0]) / (len(times) - 1) for times in stamps.values())
    return ttft, itl


async def _cluster_round(client: AsyncClient, prompts: list[list[int]]) -> tuple[float, float]:
    stamps: dict[int, list[float]] = defaultdict(list)
    started_s = time.monotonic()

    async def one(idx: int, prompt: list[int]) -> None:
        async for event in client.stream(prompt, temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True):
            if isinstance(event, Token):
                stamps[idx].append(time.monotonic())

    await asyncio.gather(*(one(idx, prompt) for idx, prompt in enumerate(prompts)))
    return _summary(stamps, started_s)


def _local_round(engine: LocalEngine, prompts: list[list[int]]) -> tuple[float, float]:
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    stamps: dict[int, list[float]] = defaultdict(list)
    started_s = time.monotonic()
    for token in engine.stream_all([(prompt, sampling) for prompt in prompts]):
        stamps[token.request_idx].append(time.monotonic())
    return _summary(stamps, started_s)


async def _measure(args: argparse.Namespace, console: Console, info: ClusterInfo, engine: LocalEngine) -> list[Sample]:
    rng = random.Random(args.seed)
    cores = os.cpu_count() or 1
    samples: list[Sample] = []
    async with AsyncClient(info.address, timeout_s=600, tls=info.tls) as client:
        for round_idx in range(args.rounds + 1):
            for concurrency in CONCURRENCIES:
                for arm in ("cluster", "in-process, 1 thread", f"in-process, {cores} threads"):
                    prompts = _prompts(rng, concurrency, engine.executor.vocab_size)
                    started_s = time.monotonic()
                    if arm == "cluster":
                        ttft, itl = await _cluster_round(client, prompts)
                    else:
                        torch.set_num_threads(1 if "1 thread" in arm else cores)
                        ttft, itl = _local_round(engine, prompts)
                    sample = Sample(
                        arm=arm,
                        concurrency=concurrency,
                        round_idx=round_idx,
                        ttft_s=ttft,
                        itl_s=itl,
                        total_s=time.monotonic() - started_s,
                    )
                    warm = " (warm-up)" if round_idx == 0 else ""
                    console.print(f"round {round_idx}{warm} c={concurrency} {arm}: {sample.total_s:.2f} s")
                    if round_idx:
                        samples.append(sample)
    return samples


def _report(samples: list[Sample], console: Console) -> None:
    table = Table(title=f"{PROMPT_TOKENS} prompt tokens, {OUTPUT_TOKENS} output tokens, greedy, cold cache")
    for column in ("concurrency", "arm", "TTFT ms (range)", "ratio", "ITL ms (range)", "ratio"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for concurrency in CONCURRENCIES:
        groups: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            if sample.concurrency == concurrency:
                groups[sample.arm].append(sample)
        base = groups["in-process, 1 thread"]
        for arm, group in groups.items():
            cells: list[str] = []
            for field in ("ttft_s", "itl_s"):
                values = [getattr(s, field) * 1000 for s in group]
                ratios = [getattr(s, field) / getattr(b, field) for s, b in zip(group, base, strict=True)]
                cells.append(f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})")
                cells.append(f"{statistics.median(ratios):.2f}")
            table.add_row(str(concurrency), arm, *cells)
    console.print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.split_cost", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts (default 1)")
    parser.add_argument("--launcher", choices=["local", "ray"], default="local", help="how the cluster is started")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    args = parser.parse_args()
    console = Console(width=120)
    router = {"local_prefill_max_tokens": 32}  # what is measured is the handoff
    with running_doors(launcher=args.launcher, router=router, console=console) as (info, config):
        samples = asyncio.run(_measure(args, console, info, LocalEngine.load(config)))
    _report(samples, console)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
