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
import os
import random
import statistics
import time

import torch
from rich.console import Console

from benchmarks.answers import Answer, read
from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from cluster.lifecycle import ClusterInfo
from common.sampling import SamplingParams
from kvrelay.client import AsyncClient
from worker.inprocess import LocalEngine

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 32
CONCURRENCIES = (1, 8)
BASE = "in-process, 1 thread"


def _prompts(rng: random.Random, count: int, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(100, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def _cluster_round(client: AsyncClient, prompts: list[list[int]]) -> list[Answer]:
    sent_s = time.perf_counter()
    streams = [client.stream(each, temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True) for each in prompts]
    return await asyncio.gather(*(read(stream, sent_s=sent_s) for stream in streams))


def _local_round(engine: LocalEngine, prompts: list[list[int]]) -> list[Answer]:
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    sent_s = time.perf_counter()
    answers = [Answer(sent_s=sent_s) for _ in prompts]
    for token in engine.stream_all([(prompt, sampling) for prompt in prompts]):
        answers[token.request_idx].stamps_s.append(time.perf_counter())
    return answers


async def _measure(args: argparse.Namespace, console: Console, info: ClusterInfo, engine: LocalEngine) -> Figures:
    rng, figures = random.Random(args.seed), Figures()
    threads = {"cluster 1P+1D": None, BASE: 1, "in-process, all threads": os.cpu_count() or 1}
    async with AsyncClient(info.address, timeout_s=600, tls=info.tls) as client:
        for round_idx in range(args.rounds + 1):
            for concurrency in CONCURRENCIES:
                for arm, num_threads in threads.items():
                    prompts = _prompts(rng, concurrency, engine.executor.vocab_size)
                    started_s = time.monotonic()
                    if num_threads is None:
                        answers = await _cluster_round(client, prompts)
                    else:
                        torch.set_num_threads(num_threads)
                        answers = _local_round(engine, prompts)
                    warm = "" if round_idx else " (warm-up)"
                    took_s = time.monotonic() - started_s
                    console.print(f"round {round_idx}{warm} c={concurrency} {arm}: {took_s:.2f} s")
                    if round_idx:
                        ttft_ms = 1000 * statistics.mean(answer.ttft_s for answer in answers)
                        itl_ms = 1000 * statistics.mean(answer.mean_gap_s or 0.0 for answer in answers)
                        figures.add("split", f"concurrency {concurrency}", arm, TTFT_ms=ttft_ms, ITL_ms=itl_ms)
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = command_line("split_cost", __doc__, rounds=5, has_launcher=True)
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts (default 1)")
    args = parser.parse_args()
    console = terminal()
    router = {"local_prefill_max_tokens": 32}  # the handoff is what is measured
    with running_doors(launcher=args.launcher, router=router, console=console) as (info, config):
        figures = asyncio.run(_measure(args, console, info, LocalEngine.load(config)))
    console.print(f"{PROMPT_TOKENS} prompt tokens, {OUTPUT_TOKENS} output tokens, greedy, cold cache")
    figures.show(console, base=BASE)
    write_figures(args.json, figures, method="benchmarks/split_cost.py")


if __name__ == "__main__":
    main()
