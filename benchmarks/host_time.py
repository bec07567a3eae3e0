"""How long does the host take for a step, and does it grow with the context: a micro benchmark.

    python -m benchmarks.host_time [--against CHECKOUT] [--rounds 5] [--json FILE]
    python -m cProfile -s tottime -m benchmarks.host_step 2      where the host spends its time

Method. 64 sequences decode over an executor that computes nothing and answers at once; what remains of a step is the
host's work, on one core. The parts, in microseconds per step, without the time inside the executor:

    plan      which sequences run, on which pages
    take      tokens appended, blocks hashed and published, events made
    report    load and KV events for the routers
    text      detokenizing and messages of the step's tokens (the event loop's work, not the engine thread's)

Contexts are 128, 2,048 and 8,192 tokens at the start. Each arm is a process of its own: this checkout in turn
(`max_steps_in_flight` 1) and overlapped (2), and another checkout (`--against`) as it is. A round runs every arm once,
in turn. An arm's sample is its median over 400 steps after 100 that warm up; reported is the median over the rounds
with the range. Prompt lengths differ by up to a block, so that each step ends a block for four of the 64 sequences and
contains their hashing, publishing and page allocation.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures

ROOT = Path(__file__).resolve().parents[1]


def _run_arm(checkout: Path, max_steps_in_flight: int) -> dict[str, dict[str, float]]:
    """Measure a checkout in a process of its own."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("host_step.py").resolve()), str(max_steps_in_flight)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def _add_round(figures: Figures, arm: str, found: dict[str, dict[str, float]]) -> None:
    for context, parts in found.items():
        engine_us = sum(parts[part] for part in ("plan", "take", "report"))
        figures.add("host time", f"context {context}", arm, **{f"{part}_us": us for part, us in parts.items()})
        figures.add("engine thread", f"context {context}", arm, us_per_step=engine_us)


def main() -> None:
    """Run the benchmark."""
    parser = command_line("host_time", __doc__, rounds=5)
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    args = parser.parse_args()
    console, figures = terminal(), Figures()
    arms = {"before": (args.against.resolve(), 1)} if args.against is not None else {}
    arms |= {"in turn": (ROOT, 1), "overlapped": (ROOT, 2)}
    for number in range(args.rounds):
        for arm, (checkout, depth) in arms.items():
            _add_round(figures, arm, _run_arm(checkout, depth))
        console.print(f"round {number + 1} of {args.rounds}")
    figures.show(console, base=next(iter(arms)))
    write_figures(args.json, figures, method="benchmarks/host_time.py")


if __name__ == "__main__":
    main()
