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

import asyncio
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.answers import Answer, closed_loop, differences, read, story
from benchmarks.clusters import ONE_THREAD_EACH, running_doors
from benchmarks.command import command_line, terminal, write_json
from benchmarks.figures import quantile, spread
from cluster.control import scale
from cluster.lifecycle import ClusterInfo
from kvrelay.client import AsyncClient

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


async def _serve(client: AsyncClient, numbers: Iterable[int]) -> list[Answer]:
    """Keep 16 streams running until the numbers end; returns the answers in order."""
    answers: dict[int, Answer] = {}

    async def ask(number: int) -> None:
        answers[number] = await read(story(client, number, num_tokens=OUTPUT_TOKENS))

    await closed_loop(ask, numbers, concurrency=NUM_STREAMS)
    return [answers[number] for number in sorted(answers)]


async def _disturbed(
    info: ClusterInfo, num_times: int, hold_s: float, console: Console
) -> tuple[list[Answer], dict[str, list[float]]]:
    """Keep 16 streams running while the pools change; returns the answers and how long each change took."""
    took: dict[str, list[float]] = {name: [] for name, _ in _CHANGES}
    is_over = asyncio.Event()
    numbers = itertools.takewhile(lambda _: not is_over.is_set(), itertools.count())
    async with AsyncClient(info.address, timeout_s=600, tls=info.tls) as client, asyncio.TaskGroup() as group:
        serving = group.create_task(_serve(client, numbers))
        for number in range(num_times):
            for name, sizes in _CHANGES:
                started_s = time.perf_counter()
                steps = await asyncio.to_thread(_scale, info.run_dir, sizes)
                took[name].append(time.perf_counter() - started_s)
                console.print(f"{number + 1} {name}: {took[name][-1]:.2f} s · {steps[-1]}")
                if name != "down":
                    await asyncio.sleep(hold_s)
        is_over.set()
    return serving.result(), took


async def _undisturbed(info: ClusterInfo, num_requests: int) -> list[Answer]:
    """Send the same requests again, 16 at a time; returns the answers."""
    async with AsyncClient(info.address, timeout_s=600, tls=info.tls) as client:
        return await _serve(client, range(num_requests))


def _scale(run_dir: Path, sizes: Mapping[str, int]) -> list[str]:
    return [step.text for step in scale(run_dir, sizes, grace_s=GRACE_S, force=True)]


def _gaps_s(answers: Sequence[Answer]) -> list[float]:
    return [gap_s for answer in answers for gap_s in answer.gaps_s]


def _report(changed: Sequence[Answer], calm: Sequence[Answer], took: dict[str, list[float]], console: Console) -> bool:
    """Print what was seen; returns whether nothing failed and no text differs."""
    table = Table("gap s", "while resizing", "undisturbed", title="gaps between two tokens of a stream")
    gaps_s = [_gaps_s(answers) for answers in (changed, calm)]
    counts = [np.histogram(gaps, bins=_EDGES_S)[0] for gaps in gaps_s]
    for index, (low, high) in enumerate(itertools.pairwise(_EDGES_S)):
        table.add_row(f"{low:g} – {high:g}", *(f"{count[index]:,}" for count in counts))
    table.add_row("p99", *(f"{quantile(gaps, 0.99):.3f}" for gaps in gaps_s))
    table.add_row("largest", *(f"{max(gaps):.2f}" for gaps in gaps_s))
    console.print(table)
    failures, num_different = differences(changed, calm)
    num_moved = sum(answer.has_moved for answer in changed)
    console.print(f"{len(changed)} answers, {len(failures)} failed, {num_different} texts differ, {num_moved} moved")
    console.print(", ".join(f"{name} took {spread(seconds)} s" for name, seconds in took.items()))
    for failure in failures:
        console.print(failure)
    return not failures and not num_different


def main() -> None:
    """Run the benchmark."""
    parser = command_line("resize", __doc__, has_launcher=True)
    parser.add_argument("--times", type=int, default=20, help="how often all changes (default 20)")
    parser.add_argument("--hold", type=float, default=10.0, help="seconds between the changes of one time (default 10)")
    args = parser.parse_args()
    console, model = terminal(), {"dtype": "float32"}
    with running_doors(launcher=args.launcher, model=model, pools=ONE_THREAD_EACH, console=console) as (info, _config):
        changed, took = asyncio.run(_disturbed(info, args.times, args.hold, console))
        calm = asyncio.run(_undisturbed(info, len(changed)))
    is_clean = _report(changed, calm, took, console)
    gaps_s = {"resizing": _gaps_s(changed), "undisturbed": _gaps_s(calm)}
    write_json(args.json, {"took_s": took, "gaps_s": gaps_s})
    if not is_clean:
        raise SystemExit("requests failed, or texts differ from those of the undisturbed run")


if __name__ == "__main__":
    main()
