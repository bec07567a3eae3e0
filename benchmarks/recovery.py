"""How long is the pause when a worker dies? kill -9 in the middle of 8 streams, real model, real processes.

    python -m benchmarks.recovery [--launcher local|ray] [--rounds 3] [--json FILE]

Method. A 1P+1D cluster of the default model (fp32, so that texts can be compared) streams 8 sampled answers of 128
tokens, seeds fixed. Once all 8 decode, the decode worker is killed with SIGKILL; in another run the prefill worker,
while it reads the prompts. The same requests are then sent again, undisturbed, and every text must be identical.
Reported per run: the largest gap between two tokens that any client saw, the largest TTFT, and the time from the kill
until the supervisor's replacement is ready in the router. All processes share this machine's cores.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

from rich.console import Console

from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from cluster.lifecycle import ClusterInfo
from kvrelay.client import AsyncClient, AsyncGenerationStream, WorkerStatus

NUM_STREAMS = 8
OUTPUT_TOKENS = 128
PROMPT = "Tell me a long story about a lighthouse keeper number {0}. " * 12


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


async def _kill(client: AsyncClient, role: str) -> float:
    """Kill a pool's worker once it is busy; returns the seconds until its replacement is ready in the router."""

    async def is_busy() -> bool:
        status = await _worker(client, role)
        wanted = NUM_STREAMS if role == "decode" else 1
        return status is not None and status.load.num_running >= wanted

    await _until(is_busy)
    before = await _worker(client, role)
    assert before is not None
    old_pid, killed_s = before.pid, time.monotonic()
    os.kill(old_pid, signal.SIGKILL)

    async def is_back() -> bool:
        status = await _worker(client, role)
        return status is not None and status.pid != old_pid

    await _until(is_back)
    return time.monotonic() - killed_s


async def _run(client: AsyncClient, run: str, role: str | None) -> tuple[list[str], dict[str, float]]:
    """Send the streams, kill the worker of a role meanwhile; returns the texts and what was seen."""
    answers = [asyncio.create_task(stream.result()) for stream in _streams(client, run)]
    seen = {} if role is None else {"worker_back_after_s": await _kill(client, role)}
    done = await asyncio.gather(*answers)
    seen |= {
        "largest_TTFT_s": max(answer.timings.ttft_s for answer in done),
        "largest_gap_s": max(answer.timings.max_itl_s or 0.0 for answer in done),
        "streams_replanned": sum(len(answer.plans) > 1 for answer in done),
    }
    return [answer.text for answer in done], seen


async def _measure(info: ClusterInfo, rounds: int, console: Console) -> Figures:
    figures = Figures()
    async with AsyncClient(info.address, timeout_s=300, tls=info.tls) as client:
        await client.chat("Warm up.", max_tokens=8)
        for round_idx in range(rounds):
            for killed in ("decode", "prefill"):
                run = f"{killed} {round_idx}"
                texts = []
                for arm, role in ((f"{killed} worker killed", killed), ("undisturbed", None)):
                    answers, seen = await _run(client, run, role)
                    texts.append(answers)
                    figures.add("recovery", f"{killed} worker", arm, **seen)
                    console.print(f"{run}, {arm}: {seen}")
                if texts[0] != texts[1]:
                    raise SystemExit(f"{run}: the answers differ from those of the undisturbed run")
    return figures


def main() -> None:
    """Run the benchmark."""
    args = command_line("recovery", __doc__, rounds=2, has_launcher=True).parse_args()
    console = terminal()
    model, router = {"dtype": "float32"}, {"local_prefill_max_tokens": 32}
    with running_doors(launcher=args.launcher, model=model, router=router, console=console) as (info, _config):
        figures = asyncio.run(_measure(info, args.rounds, console))
    console.print(f"{NUM_STREAMS} streams of {OUTPUT_TOKENS} tokens; every text is that of its undisturbed run")
    figures.show(console)
    write_figures(args.json, figures, method="benchmarks/recovery.py")


if __name__ == "__main__":
    main()
