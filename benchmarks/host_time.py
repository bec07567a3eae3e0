"""How long does the host take for a step, and does it grow with the context: a micro benchmark.

    python -m benchmarks.host_time [--against CHECKOUT] [--rounds 5] [--json FILE]
    python -m benchmarks.host_time --profile

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

import argparse
import cProfile
import itertools
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.block_hash import hash_blocks, hash_root
from common.clock import SystemClock
from common.errors import Refused
from common.fake_tokenizer import byte_tokenizer
from common.ids import RequestId
from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.core import EngineCore
from engine.events import EngineEvent, StepReport, Tokens
from engine.executor import Sampled, ScheduledSequence, StepResult
from engine.fake import fake_shape
from engine.scheduler import SchedulerLimits
from engine.sequence import EngineRequest
from worker.output import OutputStreams

NUM_SEQUENCES = 64
CONTEXTS = (128, 2048, 8192)
BLOCK_SIZE = 16
WARM_STEPS, STEPS = 100, 400
PARTS = ("plan", "take", "report", "text")
ROOT = Path(__file__).resolve().parents[1]


class _NullStore:
    """Pages without bytes."""

    def __init__(self, num_blocks: int) -> None:
        self.shape = fake_shape(BLOCK_SIZE)
        self.num_blocks = num_blocks


@dataclass(slots=True)
class _Done:
    answers: list[StepResult]

    def results(self) -> list[StepResult]:
        """Return what was known beforehand."""
        return self.answers


class _NullExecutor:
    """Answers every step with letters; counts the time that it takes itself. Has the protocol's old method, too."""

    def __init__(self, num_blocks: int, max_steps_in_flight: int) -> None:
        self.kv: Any = _NullStore(num_blocks)
        self.max_model_len = 1 << 20
        self.vocab_size = 256
        self.eos_token_ids = frozenset[int]()
        self.model_name = "null"
        self.max_steps_in_flight = max_steps_in_flight
        self.inside_ns = 0
        self._num_steps = 0

    def execute(self, batch: Seq[ScheduledSequence]) -> list[StepResult]:
        """Return a token for everybody."""
        begin_ns = time.perf_counter_ns()
        self._num_steps += 1
        token_id = 97 + self._num_steps % 26
        results = [
            StepResult(sampled=[Sampled(token_id=token_id)] * item.num_samples, prompt_logprobs=[]) for item in batch
        ]
        self.inside_ns += time.perf_counter_ns() - begin_ns
        return results

    def launch(self, batch: Seq[ScheduledSequence]) -> _Done:
        """Return a step that is done."""
        return _Done(self.execute(batch))


class _Bench:
    """A core with 64 running sequences."""

    def __init__(self, context: int, max_steps_in_flight: int) -> None:
        blocks_each = (context + WARM_STEPS + STEPS) // BLOCK_SIZE + 5
        self._executor = _NullExecutor(NUM_SEQUENCES * blocks_each + 64, max_steps_in_flight)
        limits = SchedulerLimits(
            block_size=BLOCK_SIZE,
            max_step_tokens=NUM_SEQUENCES * (context + BLOCK_SIZE),
            max_running=NUM_SEQUENCES,
            max_waiting=NUM_SEQUENCES,
        )
        self.core = EngineCore(self._executor, limits, SystemClock())
        tokenizer = byte_tokenizer()
        self._inbox: list[tuple[OutputStreams, EngineEvent]] = []
        root = hash_root(model_fingerprint="null")
        for i in range(NUM_SEQUENCES):
            prompt = [i, *range(100, 99 + context + i % BLOCK_SIZE)]
            request = EngineRequest(
                request_id=RequestId(f"req-{i}"),
                prompt_token_ids=as_tokens(prompt),
                sampling=SamplingParams(temperature=0.0, max_tokens=WARM_STEPS + STEPS + 32, ignore_eos=True),
                hash_root=root,
                block_hashes=hash_blocks(prompt, root=root, block_size=BLOCK_SIZE),
            )
            streams = OutputStreams(request, tokenizer)
            group = self.core.add(request, partial(self._deliver, streams))
            if isinstance(group, Refused):
                raise RuntimeError(group.reason)

    def _deliver(self, streams: OutputStreams, event: EngineEvent) -> None:
        self._inbox.append((streams, event))

    def step(self) -> dict[str, float]:
        """Run one step; returns its parts in microseconds."""
        inside_ns = self._executor.inside_ns
        stamps = [time.perf_counter_ns()]
        plan, emitted = self.core.begin_step()
        stamps.append(time.perf_counter_ns())
        emitted += self.core.finish_step(plan)
        stamps.append(time.perf_counter_ns())
        StepReport(kv_events=self.core.pool.drain_events(), load=self.core.load())
        stamps.append(time.perf_counter_ns())
        for group, event in emitted:
            group.sink(event)
        for streams, event in self._inbox:
            if isinstance(event, Tokens):
                streams.take(event.tokens)
        self._inbox.clear()
        stamps.append(time.perf_counter_ns())
        spent_ns = [b - a for a, b in itertools.pairwise(stamps)]
        spent_ns[1] -= self._executor.inside_ns - inside_ns
        return {part: ns / 1000 for part, ns in zip(PARTS, spent_ns, strict=True)}


def _measure(max_steps_in_flight: int) -> dict[str, dict[str, float]]:
    """Return the medians of every part for every context."""
    found: dict[str, dict[str, float]] = {}
    for context in CONTEXTS:
        bench = _Bench(context, max_steps_in_flight)
        for _ in range(WARM_STEPS):
            bench.step()
        samples = [bench.step() for _ in range(STEPS)]
        assert bench.core.load().num_running == NUM_SEQUENCES, "all sequences must decode to the end"
        found[str(context)] = {part: statistics.median(s[part] for s in samples) for part in PARTS}
    return found


def _run_arm(checkout: Path, max_steps_in_flight: int) -> dict[str, dict[str, float]]:
    """Measure a checkout in a process of its own."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--arm", str(max_steps_in_flight)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def _profile(console: Console) -> None:
    """Print the functions in which the host spends its time."""
    bench = _Bench(CONTEXTS[0], 2)
    for _ in range(WARM_STEPS):
        bench.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STEPS):
        bench.step()
    profiler.disable()
    console.print(f"{STEPS} steps of {NUM_SEQUENCES} sequences; the profiler itself makes small functions look larger")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def _report(rounds: list[dict[str, dict[str, dict[str, float]]]], console: Console) -> None:
    table = Table(title=f"Host time per step, {NUM_SEQUENCES} sequences, microseconds: median of the rounds (range)")
    for column in ("arm", "context", *PARTS, "engine thread", "ratio"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    base = next(iter(rounds[0]))
    for arm in rounds[0]:
        for context in map(str, CONTEXTS):
            cells = []
            for parts in (*((part,) for part in PARTS), ("plan", "take", "report")):
                values = [sum(r[arm][context][part] for part in parts) for r in rounds]
                cells.append(f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})")
            ratios = [
                sum(r[arm][context][part] for part in PARTS[:3]) / sum(r[base][context][part] for part in PARTS[:3])
                for r in rounds
            ]
            table.add_row(arm, context, *cells, f"{statistics.median(ratios):.2f}")
    console.print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_time", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--profile", action="store_true", help="print a profile instead")
    parser.add_argument("--arm", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm is not None:
        json.dump(_measure(args.arm), sys.stdout)
        return
    console = Console(width=140)
    if args.profile:
        _profile(console)
        return
    arms = {"before": (args.against.resolve(), 1)} if args.against is not None else {}
    arms |= {"in turn": (ROOT, 1), "overlapped": (ROOT, 2)}
    rounds = []
    for round_idx in range(args.rounds):
        rounds.append({arm: _run_arm(checkout, depth) for arm, (checkout, depth) in arms.items()})
        console.print(f"round {round_idx + 1} of {args.rounds}")
    _report(rounds, console)
    if args.json is not None:
        args.json.write_text(json.dumps(rounds, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
