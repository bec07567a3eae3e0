"""Gaps of clients while the pools grow, change over and shrink: twenty times under 16 streams, real model.

    python -m benchmarks.resize [--launcher local|ray] [--times 20] [--hold 10] [--json FILE]

Method. 1P+1D of the default model (fp32, so that texts can be compared) serves 16 streams at any time, each of 160
sampled tokens with a fixed seed. Meanwhile `kvrelay scale` makes it 2P+2D, 1P+3D (a prefill worker flips its role),
2P+2D (it flips back) and 1P+1D again: that is one *time*, with some seconds between its changes in which new requests
go to the workers as they are then. Afterwards every request is sent again, undisturbed, and each text must be
identical. Reported: failed requests, answers that moved, every gap between two tokens of a stream in a histogram beside
the gaps of the undisturbed run, and how long each kind of change took. All processes, those that start and load their
model included, share this machine's cores.
"""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.clusters import running_doors
from cluster.control import scale
from cluster.lifecycle import ClusterInfo
from kvrelay.client import AsyncClient, KvrelayError, Token

NUM_STREAMS = 16
OUTPUT_TOKENS = 160
GRACE_S = 60.0
_CHANGES: tuple[tuple[str, dict[str, int]], ...] = (
    ("up", {"prefill": 2, "decode": 2}),
    ("flip", {"prefill": 1, "decode": 3}),
    ("back", {"prefill": 2, "decode": 2}),
    ("down", {"prefill": 1, "decode": 1}),
)
"""Steps of one *time*: two workers start, one changes its pool, it changes back, two go."""
_EDGES_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, float("inf"))


@dataclass(slots=True, kw_only=True)
class Answers:
    """Outcomes of the requests of one pass."""

    texts: dict[int, str] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    num_moved: int = 0
    failures: list[str] = field(default_factory=list)


async def _ask(client: AsyncClient, number: int, answers: Answers) -> None:
    prompt = f"Tell me a long story about lighthouse keeper number {number} and the ships that pass. " * 6
    stream = client.stream_chat(prompt, temperature=0.8, seed=number, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    last_s: float | None = None
    try:
        async with stream:
            async for event in stream:
                if isinstance(event, Token):
                    now_s = time.perf_counter()
                    if last_s is not None:
                        answers.gaps_s.append(now_s - last_s)
                    last_s = now_s
            done = await stream.result()
    except KvrelayError as error:
        answers.failures.append(f"{number}: {type(error).__name__}: {error}")
        return
    answers.texts[number] = done.text
    answers.num_moved += len(done.plans) > 1


async def _disturbed(
    info: ClusterInfo, num_times: int, hold_s: float, console: Console
) -> tuple[Answers, dict[str, list[float]]]:
    """Keep 16 streams running while the pools change; returns what came of them and how long each change took."""
    answers, numbers = Answers(), itertools.count()
    took: dict[str, list[float]] = {name: [] for name, _ in _CHANGES}
    is_over = asyncio.Event()

    async def place(client: AsyncClient) -> None:
        while not is_over.is_set():
            await _ask(client, next(numbers), answers)

    async with AsyncClient(info.address, timeout_s=600, tls=info.tls) as client, asyncio.TaskGroup() as group:
        for _ in range(NUM_STREAMS):
            group.create_task(place(client))
        for number in range(num_times):
            for name, sizes in _CHANGES:
                started_s = time.perf_counter()
                steps = await asyncio.to_thread(_scale, info.run_dir, sizes)
                took[name].append(time.perf_counter() - started_s)
                console.print(f"{number + 1} {name}: {took[name][-1]:.2f} s · {steps[-1]}")
                if name != "down":
                    await asyncio.sleep(hold_s)
        is_over.set()
    return answers, took


def _scale(run_dir: Path, sizes: Mapping[str, int]) -> list[str]:
    return list(scale(run_dir, sizes, grace_s=GRACE_S, force=True))


async def _undisturbed(info: ClusterInfo, numbers: Sequence[int]) -> Answers:
    """Send the same requests again, 16 at a time."""
    answers, left = Answers(), iter(numbers)

    async def place(client: AsyncClient) -> None:
        for number in left:
            await _ask(client, number, answers)

    async with AsyncClient(info.address, timeout_s=600, tls=info.tls) as client, asyncio.TaskGroup() as group:
        for _ in range(NUM_STREAMS):
            group.create_task(place(client))
    return answers


def _report(changed: Answers, calm: Answers, took: dict[str, list[float]], console: Console) -> None:
    table = Table(title="gaps between two tokens of a stream", title_justify="left", box=None)
    for column in ("gap s", "while resizing", "undisturbed"):
        table.add_column(column, justify="right")
    counts = [np.histogram(answers.gaps_s, bins=_EDGES_S)[0] for answers in (changed, calm)]
    for index, (low, high) in enumerate(itertools.pairwise(_EDGES_S)):
        table.add_row(f"{low:g} – {high:g}", *(f"{count[index]:,}" for count in counts))
    table.add_row("p99", *(f"{np.percentile(answers.gaps_s, 99):.3f}" for answers in (changed, calm)))
    table.add_row("largest", *(f"{max(answers.gaps_s):.2f}" for answers in (changed, calm)))
    console.print(table)
    num_answers = len(changed.texts) + len(changed.failures)
    num_different = sum(text != calm.texts.get(number) for number, text in changed.texts.items())
    console.print(
        f"{num_answers} answers, {len(changed.failures)} failed, {num_different} texts differ,"
        f" {changed.num_moved} moved"
    )
    console.print(", ".join(f"{name} took {_spread(seconds)}" for name, seconds in took.items()))
    for failure in changed.failures:
        console.print(failure)


def _spread(seconds: Sequence[float]) -> str:
    return f"{np.median(seconds):.2f} s ({min(seconds):.2f}–{max(seconds):.2f})"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20, help="how often all changes (default 20)")
    parser.add_argument("--hold", type=float, default=10.0, help="seconds between the changes of one time (default 10)")
    parser.add_argument("--launcher", choices=["local", "ray"], default="local", help="how the cluster is started")
    parser.add_argument("--json", type=Path, help="write every gap and time to this file")
    args = parser.parse_args()
    console = Console(width=140)
    pools = {name: {"threads": 1} for name in ("prefill", "decode")}
    with running_doors(launcher=args.launcher, model={"dtype": "float32"}, pools=pools, console=console) as (
        info,
        _config,
    ):
        changed, took = asyncio.run(_disturbed(info, args.times, args.hold, console))
        calm = asyncio.run(_undisturbed(info, sorted(changed.texts)))
    _report(changed, calm, took, console)
    if args.json is not None:
        record = {"took_s": took, "gaps_s": {"resizing": changed.gaps_s, "undisturbed": calm.gaps_s}}
        args.json.write_text(json.dumps(record) + "\n", encoding="utf-8")
    if changed.failures or any(text != calm.texts.get(number) for number, text in changed.texts.items()):
        raise SystemExit("requests failed, or texts differ from those of the undisturbed run")


if __name__ == "__main__":
    main()
