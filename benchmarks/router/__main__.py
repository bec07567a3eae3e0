"""Runs the parts and reports; the method is in the package's docstring."""

import asyncio
import json
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import benchmarks.router as this
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, quantile
from benchmarks.peers.venv import PeerPackages, VenvFailed, ensure_venv
from benchmarks.router.arms import ArmMissing, RequestArm, kvrelay_arm, sglang_arm, vllm_arm
from benchmarks.router.clients import Load
from benchmarks.router.full_fleet import FULL_OF, measure_full_fleet
from benchmarks.router.in_process import (
    BLOCK_SIZE,
    Filling,
    measure_decisions,
    measure_hashing,
    measure_lookups,
    measure_memory,
    measure_updates,
)

DYNAMO = PeerPackages(name="ai-dynamo-runtime-1.6.1", steps=(("install", "ai-dynamo-runtime==1.6.1"),))
PARTS = ("hashing", "index", "decision", "full", "requests")
POLICIES = ("predictive", "random")
NUM_CONNECTIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured."""

    num_rounds: int
    hashed: tuple[int, ...]
    """Tokens."""
    total_blocks: int
    """Different blocks in an index that is asked."""
    lookups: tuple[tuple[int, int], ...]
    """(workers, blocks)."""
    updates: tuple[tuple[int, int], ...]
    """(workers, blocks in a batch)."""
    num_updated: int
    decisions: tuple[tuple[int, int], ...]
    """(workers, tokens)."""
    num_decisions: int
    full: tuple[tuple[int, int], ...]
    """(workers, tenants)."""
    num_reports: int
    requests: tuple[tuple[int, int, int], ...]
    """(prompt tokens, chunks of the answer, requests in a round)."""


FULL = Extent(
    num_rounds=5,
    hashed=(1024, 16_384, 131_072),
    total_blocks=200_000,
    lookups=tuple((workers, blocks) for blocks in (128, 1024, 8192) for workers in (8, 64, 512, 1000)),
    updates=((8, 1000), (512, 1000), (512, 64), (512, 1)),
    num_updated=1_000_000,
    decisions=tuple((workers, tokens) for tokens in (1024, 16_384, 131_072) for workers in (8, 64, 512, 1000)),
    num_decisions=200,
    full=((8, 1), (64, 1), (64, 16), (64, 100), (512, 100)),
    num_reports=2000,
    requests=((50, 1, 1000), (50, 32, 300), (2048, 1, 600), (16_384, 1, 200)),
)
QUICK = Extent(
    num_rounds=1,
    hashed=(1024, 16_384),
    total_blocks=10_000,
    lookups=((8, 128), (64, 1024)),
    updates=((8, 1000),),
    num_updated=20_000,
    decisions=((8, 1024), (64, 4096)),
    num_decisions=20,
    full=((8, 4),),
    num_reports=50,
    requests=((50, 1, 50),),
)


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = command_line("router", this.__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that everything runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these parts")
    parser.add_argument("--without-peers", action="store_true", help="measure our router alone")
    args = parser.parse_args()
    console, figures = terminal(), Figures()
    extent = QUICK if args.quick else FULL
    started_s, rng = time.monotonic(), random.Random(1)
    for round_idx in range(extent.num_rounds):
        console.print(f"round {round_idx + 1} of {extent.num_rounds}, {time.monotonic() - started_s:.0f} s")
        for part, measure in _in_process(extent, figures, rng, with_peers=not args.without_peers):
            if part in args.parts:
                measure()
    if "requests" in args.parts:
        asyncio.run(_measure_requests(extent, figures, rng, with_peers=not args.without_peers))
    figures.show(console)
    write_figures(
        args.json, figures, method="benchmarks/router/__init__.py", parts=list(args.parts), extent=asdict(extent)
    )


def _in_process(
    extent: Extent, figures: Figures, rng: random.Random, *, with_peers: bool
) -> list[tuple[str, Callable[[], None]]]:
    """Return one round of what runs in this process."""
    steps: list[tuple[str, Callable[[], None]]] = [
        ("hashing", partial(measure_hashing, figures, rng, lengths=extent.hashed))
    ]
    for workers, blocks in extent.lookups:
        filling = Filling(num_workers=workers, num_blocks=blocks, total_blocks=extent.total_blocks)
        steps.append(("index", partial(measure_lookups, figures, rng, filling)))
        if with_peers:
            steps.append(("index", partial(_measure_dynamo, figures, filling)))
    for workers, batch in extent.updates:
        num_blocks = extent.num_updated // (1 if batch > 1 else 10)
        size = {"num_workers": workers, "batch": batch, "num_blocks": num_blocks}
        steps.append(("index", partial(measure_updates, figures, rng, **size)))
        steps.append(("index", partial(measure_memory, figures, **size)))
    for workers, tokens in extent.decisions:
        filling = Filling(num_workers=workers, num_blocks=tokens // BLOCK_SIZE, total_blocks=extent.total_blocks)
        for policy in POLICIES:
            measure = partial(measure_decisions, policy=policy, num_calls=extent.num_decisions)
            steps.append(("decision", partial(measure, figures, rng, filling)))
    for workers, tenants in extent.full:
        for full_of in FULL_OF:
            measure = partial(measure_full_fleet, num_workers=workers, num_tenants=tenants, full_of=full_of)
            steps.append(("full", partial(measure, figures, num_reports=extent.num_reports)))
    return steps


def _measure_dynamo(figures: Figures, filling: Filling) -> None:
    """Let the peer's radix tree do the same, in its own process."""
    if DYNAMO.name in figures.missing:
        return
    try:
        python = ensure_venv(DYNAMO, print) / "bin" / "python"
        arguments = [str(number) for number in (filling.num_workers, filling.num_blocks, filling.total_blocks)]
        script = Path(__file__).with_name("dynamo_arm.py")
        done = subprocess.run([python, script, *arguments], check=True, capture_output=True, text=True)
    except (VenvFailed, subprocess.CalledProcessError) as error:
        figures.missing[DYNAMO.name] = str(getattr(error, "stderr", None) or error)
        return
    found = json.loads(done.stdout.splitlines()[-1])
    case = f"{filling.num_blocks} blocks × {filling.num_workers} workers"
    figures.add("index", f"match, {case}", "dynamo RadixTree", us_p50=found["match_us"])
    figures.add("index", f"match, all workers' numbers, {case}", "dynamo RadixTree", us_p50=found["match_all_us"])
    figures.add(
        "index", f"stored, {case}", "dynamo RadixTree", million_blocks_per_s=found["million_stored_per_s"]
    )  # fmt: skip


async def _measure_requests(extent: Extent, figures: Figures, rng: random.Random, *, with_peers: bool) -> None:
    for num_tokens, num_chunks, num_requests in extent.requests:
        async with AsyncExitStack() as stack:
            arms = [await stack.enter_async_context(kvrelay_arm())]
            for name, start in (("sglang-router", sglang_arm), ("vllm-router", vllm_arm)) if with_peers else ():
                if name not in figures.missing:
                    try:
                        arms.append(await stack.enter_async_context(start(num_chunks)))
                    except ArmMissing as error:
                        figures.missing[name] = str(error)
            for round_idx in range(extent.num_rounds + 1):
                prompts = [rng.choices(range(40_000), k=num_tokens) for _ in range(num_requests)]
                load = Load(prompts=prompts, num_chunks=num_chunks, num_connections=NUM_CONNECTIONS)
                for arm in arms:
                    await _measure_round(figures if round_idx else Figures(), arm, load)  # the first one warms up


async def _measure_round(figures: Figures, arm: RequestArm, load: Load) -> None:
    router_s, mock_s = arm.cpu_s()
    measured = await arm.run(load)
    router_end_s, mock_end_s = arm.cpu_s()
    num_requests = len(load.prompts)
    figures.add(
        "requests",
        f"{len(load.prompts[0])} tokens, {load.num_chunks} chunks",
        arm.name,
        requests_per_s=num_requests / measured.wall_s,
        router_CPU_us_per_request=(router_end_s - router_s) / num_requests * 1e6,
        mock_CPU_us_per_request=(mock_end_s - mock_s) / num_requests * 1e6,
        first_chunk_ms_p50=quantile(measured.first_chunk_s, 0.5) * 1e3,
        first_chunk_ms_p99=quantile(measured.first_chunk_s, 0.99) * 1e3,
    )


if __name__ == "__main__":
    main()
