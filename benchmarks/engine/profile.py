"""Where a step of our engine spends its time: clocks around the seams' public methods, in this process.

On a CPU every call computes before it returns, so that the clocks add up to the step. They cost about 0.3 µs a call,
some 0.1 ms a step. "host" is what is left of a step: scheduling, input preparation, bookkeeping.
"""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.cases import Case, Rate
from common.config import parse_config
from common.sampling import SamplingParams
from engine.core import EngineCore
from engine.model.decoder import Decoder
from engine.sampler import Sampler
from worker.inprocess import LocalEngine

_STEP = "step"
_HOST = "host"
_PROJECTIONS = ("qkv", "output", "gate_up", "down")
_CASES = (
    Case(name="decode 1", rate=Rate.DECODE, num_requests=1, prompt_tokens=32, output_tokens=64),
    Case(name="decode 8", rate=Rate.DECODE, num_requests=8, prompt_tokens=32, output_tokens=48),
    Case(name="decode 32", rate=Rate.DECODE, num_requests=32, prompt_tokens=32, output_tokens=32),
    Case(name="decode 1 at 4k", rate=Rate.DECODE, num_requests=1, prompt_tokens=4096, output_tokens=32),
    Case(name="prefill chunk", rate=Rate.PREFILL, num_requests=2, prompt_tokens=1024, output_tokens=1),
)


@dataclass(slots=True)
class Clocks:
    """Seconds spent, by part, since the last `take`."""

    spent_s: defaultdict[str, float]
    num_rows: int = 0
    """Tokens of the step's forward pass."""

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with a clock around it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s[part] += time.perf_counter() - started_s

        return run

    def take(self) -> dict[str, float]:
        """Return what was spent and start again."""
        taken = dict(self.spent_s)
        self.spent_s.clear()
        return taken


class _TimedStepOps:
    """A planned step whose every operation has a clock."""

    def __init__(self, ops: Any, clocks: Clocks) -> None:
        self._ops = ops
        self._clocks = clocks

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return self._clocks.timed(name, found) if callable(found) else found


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step."""

    num_rows: int
    parts_s: dict[str, float]


@contextmanager
def _clocks_in_the_engine(steps: list[StepTimes]) -> Iterator[None]:
    """Put clocks into the classes, so that whatever is built meanwhile has them; every step is appended to `steps`."""
    clocks = Clocks(spent_s=defaultdict(float))
    init, forward, logits, step, sample = (
        Decoder.__init__,
        Decoder.forward,
        Decoder.logits,
        EngineCore.step,
        Sampler.sample,
    )

    def timed_init(self: Decoder, config: Any, weights: Any) -> None:
        for layer in weights.layers:
            for name in _PROJECTIONS:
                setattr(layer, name, clocks.timed(f"{name} product", getattr(layer, name)))
        init(self, config, weights)

    def timed_forward(self: Decoder, token_ids: torch.Tensor, ops: Any) -> torch.Tensor:
        clocks.num_rows = int(token_ids.shape[0])
        return forward(self, token_ids, _TimedStepOps(ops, clocks))

    def timed_step(self: EngineCore) -> Any:
        started_s = time.perf_counter()
        clocks.take()
        emitted = step(self)
        parts = clocks.take()
        parts[_HOST] = time.perf_counter() - started_s - sum(parts.values())
        steps.append(StepTimes(clocks.num_rows, parts))
        return emitted

    patches: list[tuple[Any, str, Any, Any]] = [
        (Decoder, "__init__", init, timed_init),
        (Decoder, "forward", forward, timed_forward),
        (Decoder, "logits", logits, clocks.timed("head product", logits)),
        (EngineCore, "step", step, timed_step),
        (Sampler, "sample", sample, clocks.timed("sampling", sample)),
    ]
    for owner, name, _, replacement in patches:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original, _ in patches:
            setattr(owner, name, original)


def print_profile(model_dir: Path, *, threads: int, console: Console) -> None:
    """Load the engine here and print a step's parts, in milliseconds, for decode steps and a prefill chunk."""
    torch.set_num_threads(threads)
    steps: list[StepTimes] = []
    columns: dict[str, dict[str, float]] = {}
    with _clocks_in_the_engine(steps):
        model = {"id": str(model_dir), "dtype": "bfloat16", "device": "cpu"}
        pools = {"decode": {"kv_memory_gib": 1, "threads": threads}}
        engine = LocalEngine.load(parse_config({"model": model, "pools": pools}, source="profile"))
        rng = random.Random(1)
        for case in _CASES:
            for _ in range(2):  # the first time warms up
                steps.clear()
                _generate(engine, case, rng)
            columns[case.name] = _median_step(steps, case)
    console.print(_table(columns))


def _generate(engine: LocalEngine, case: Case, rng: random.Random) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=case.output_tokens, ignore_eos=True)
    prompts = case.prompts(rng, engine.executor.vocab_size)
    for _ in engine.stream_all([(prompt, sampling) for prompt in prompts]):
        pass


def _median_step(steps: list[StepTimes], case: Case) -> dict[str, float]:
    """Return the median of each part over the steps of the case's kind: full batches, or full chunks."""
    if case.rate is Rate.DECODE:
        chosen = [step for step in steps if step.num_rows == case.num_requests]
    else:
        largest = max(step.num_rows for step in steps)
        chosen = [step for step in steps if step.num_rows == largest]
    parts = {part for step in chosen for part in step.parts_s}
    median = {part: statistics.median(step.parts_s.get(part, 0.0) for step in chosen) for part in parts}
    return {_STEP: statistics.median(sum(step.parts_s.values()) for step in chosen)} | median


def _table(columns: dict[str, dict[str, float]]) -> Table:
    table = Table(title="milliseconds of one step (share)")
    table.add_column("part")
    for name in columns:
        table.add_column(name, justify="right")
    first = next(iter(columns.values()))
    for part in sorted({part for column in columns.values() for part in column}, key=lambda p: -first.get(p, 0.0)):
        cells = []
        for column in columns.values():
            part_s = column.get(part, 0.0)
            cells.append(f"{part_s * 1e3:.2f} ({part_s / column[_STEP]:.0%})")
        table.add_row(part, *cells)
    return table
