"""How long is the pause when a worker dies? kill -9 in the middle of 8 streams, real model, real processes.

    python -m benchmarks.recovery [--launcher local|ray] [--rounds 3] [--json FILE]

Method. A 1P+1D cluster of the default model (fp32, so that texts can be compared) streams 8 sampled answers of 128
tokens, seeds fixed. Once all 8 decode, the decode worker is killed with SIGKILL; in another run the prefill worker,
while it reads the prompts. The same requests are then sent again, undisturbed, and every text must be identical.
Reported per run: the largest gap between two tokens that any client saw, the largest TTFT, and the time from the kill
until the supervisor's replacement is ready in the router. All processes share this machine's cores.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.clusters import running_doors
from cluster.lifecycle import ClusterInfo
from kvrelay.client import AsyncClient, AsyncGenerationStream, Generation, WorkerStatus

NUM_STREAMS = 8
OUTPUT_TOKENS = 128
PROMPT = "Tell me a long story about a lighthouse keeper number {0}. " * 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of 8 streams."""

    killed: str
    """Role of the killed worker, or "nobody"."""
    run: str
    max_ttft_s: float
    max_itl_s: float
    num_replanned: int
    """Streams that got a second plan."""
    back_s: float
    """Kill to the replacement being ready; 0 without a kill."""


async def _worker(client: AsyncClient, role: str) -> WorkerStatus | None:
    """Return what a pool's worker reports; None while there is none."""
    return next((view.status for view in (await client.status()).workers if view.role == role), None)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - a remote state, which has no event
            await asyncio.sleep(0.02)


def _streams(client: AsyncClient, run: str) -> list[AsyncGenerationStream]:
    # Prompts differ from run to run, so that a prefill worker really has something to read.
    return [
        client.stream_chat(
            f"{run}. " + PROMPT.format(i),
            temperature=0.8,
            seed=1000 + i,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
        )
        for i in range(NUM_STREAMS)
    ]


async def _run(client: AsyncClient, run: str, killed: str) -> tuple[list[Generation], Outcome]:
    answers = [asyncio.create_task(stream.result()) for stream in _streams(client, run)]
    back_s = 0.0
    if killed != "nobody":

        async def is_busy() -> bool:
            status = await _worker(client, killed)
            wanted = NUM_STREAMS if killed == "decode" else 1
            return status is not None and status.load.num_running >= wanted

        await _until(is_busy)
        before = await _worker(client, killed)
        assert before is not None
        old_pid, killed_s = before.pid, time.monotonic()
        os.kill(old_pid, signal.SIGKILL)

        async def is_back() -> bool:
            status = await _worker(client, killed)
            return status is not None and status.pid != old_pid

        await _until(is_back)
        back_s = time.monotonic() - killed_s
    done = await asyncio.gather(*answers)
    return done, Outcome(
        killed=killed,
        run=run,
        max_ttft_s=max(answer.timings.ttft_s for answer in done),
        max_itl_s=max(answer.timings.max_itl_s or 0.0 for answer in done),
        num_replanned=sum(len(answer.plans) > 1 for answer in done),
        back_s=back_s,
    )


async def _measure(info: ClusterInfo, rounds: int, console: Console) -> list[Outcome]:
    outcomes: list[Outcome] = []
    async with AsyncClient(info.address, timeout_s=300, tls=info.tls) as client:
        await client.chat("Warm up.", max_tokens=8)
        for round_idx in range(rounds):
            for killed in ("decode", "prefill"):
                run = f"{killed} {round_idx}"
                texts: list[list[str]] = []
                for victim in (killed, "nobody"):
                    answers, outcome = await _run(client, run, victim)
                    texts.append([answer.text for answer in answers])
                    outcomes.append(outcome)
                    console.print(f"{run}: killed {victim}, {outcome}")
                if texts[0] != texts[1]:
                    raise SystemExit(f"{run}: the answers differ from those of the undisturbed run")
    return outcomes


def _report(outcomes: list[Outcome], console: Console) -> None:
    table = Table(title=f"{NUM_STREAMS} streams of {OUTPUT_TOKENS} tokens; every text identical to its undisturbed run")
    for column in ("run", "killed", "streams replanned", "largest TTFT s", "largest gap s", "worker back after s"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.run,
            outcome.killed,
            str(outcome.num_replanned),
            f"{outcome.max_ttft_s:.2f}",
            f"{outcome.max_itl_s:.2f}",
            f"{outcome.back_s:.2f}" if outcome.back_s else "",
        )
    console.print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds (default 2)")
    parser.add_argument("--launcher", choices=["local", "ray"], default="local", help="how the cluster is started")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    args = parser.parse_args()
    console = Console(width=140)
    model, router = {"dtype": "float32"}, {"local_prefill_max_tokens": 32}
    with running_doors(launcher=args.launcher, model=model, router=router, console=console) as (info, _config):
        outcomes = asyncio.run(_measure(info, args.rounds, console))
    _report(outcomes, console)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
