"""Runs the parts and reports; the method is in the package's docstring."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import uvloop

import benchmarks.router as this
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, in_turn
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
from benchmarks.router.requests import measure_requests
from benchmarks.router.tokens import chosen, measure_tokens, tls_ratios

PARTS = ("hashing", "index", "decision", "full", "requests", "tokens")
POLICIES = ("predictive", "random")


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
    window_s: float
    """Time in which tokens are counted."""


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
    window_s=3.0,
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
    window_s=0.3,
)


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = command_line("router", this.__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that everything runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these parts")
    parser.add_argument("--rounds", type=int, help="measured rounds (default 5, or 1 with --quick)")
    parser.add_argument("--only", default="", help="of tokens: cases and arms whose name, as paced/http, contains this")
    parser.add_argument("--tls", action="store_true", help="of tokens: each arm with TLS, too")
    args = parser.parse_args()
    console, figures = terminal(), Figures()
    extent = QUICK if args.quick else FULL
    extent = replace(extent, num_rounds=args.rounds or extent.num_rounds)
    started_s, rng = time.monotonic(), random.Random(1)
    for round_idx in range(extent.num_rounds):
        console.print(f"round {round_idx + 1} of {extent.num_rounds}, {time.monotonic() - started_s:.0f} s")
        for part, measure in _in_process(extent, figures, rng):
            if part in args.parts:
                measure()
        for case, arm, ending in in_turn(chosen(args.only, tls=args.tls), round_idx) if "tokens" in args.parts else ():
            uvloop.run(measure_tokens(figures, case, arm, ending, seconds=extent.window_s))
    if "requests" in args.parts:
        for num_tokens, num_chunks, num_requests in extent.requests:
            sizes = {"num_tokens": num_tokens, "num_chunks": num_chunks, "num_requests": num_requests}
            asyncio.run(measure_requests(figures, rng, **sizes, num_rounds=extent.num_rounds))
    figures.show(console)
    for line in tls_ratios(figures):
        console.print(line)
    write_figures(
        args.json, figures, method="benchmarks/router/__init__.py", parts=list(args.parts), extent=asdict(extent)
    )


def _in_process(extent: Extent, figures: Figures, rng: random.Random) -> list[tuple[str, Callable[[], None]]]:
    """Return one round of what runs in this process."""
    steps: list[tuple[str, Callable[[], None]]] = [
        ("hashing", partial(measure_hashing, figures, rng, lengths=extent.hashed))
    ]
    for workers, blocks in extent.lookups:
        filling = Filling(num_workers=workers, num_blocks=blocks, total_blocks=extent.total_blocks)
        steps.append(("index", partial(measure_lookups, figures, rng, filling)))
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


if __name__ == "__main__":
    main()
