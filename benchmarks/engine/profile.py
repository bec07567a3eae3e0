"""Profile of a step of our engine: clocks around the seams' public methods, in this process.

On a CPU every call computes before it returns, so that the clocks add up to the step. "host" is what is left of a step:
scheduling, input preparation, bookkeeping. Served, a layer of packed weights is one call (`engine.ops.cpu.ops`);
here each operation is called by itself, which the same kernels in the same order allow, and which costs a millisecond
in a small step. So the table begins with the step as served, without a clock inside.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import engine.loading
from benchmarks.engine.cases import Case, Rate
from benchmarks.figures import Figures
from common.config import ServingConfig, parse_config
from common.sampling import SamplingParams
from engine.core import EngineCore
from engine.executor import ScheduledSequence
from engine.model.decoder import Decoder
from engine.runner import ModelExecutor
from engine.sampling.sampler import Sampler
from worker.inprocess import LocalEngine

_SERVED = "step as served"
_STEP = "step in parts"
_HOST = "host"
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
def _patched(patches: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, and set them back."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


@contextmanager
def _clock_around_the_step(clocks: Clocks, steps: list[StepTimes]) -> Iterator[None]:
    """Append every step of every core to `steps`, with what its parts took."""
    step, launch = EngineCore.step, ModelExecutor.launch

    def timed_launch(self: Any, batch: Sequence[ScheduledSequence]) -> Any:
        clocks.num_rows = sum(item.num_new_tokens for item in batch)
        return launch(self, batch)

    def timed_step(self: EngineCore) -> Any:
        clocks.take()
        started_s = time.perf_counter()
        emitted = step(self)
        elapsed_s = time.perf_counter() - started_s
        parts = clocks.take()
        parts[_HOST] = elapsed_s - sum(parts.values())
        steps.append(StepTimes(clocks.num_rows, parts))
        return emitted

    with _patched([(EngineCore, "step", timed_step), (ModelExecutor, "launch", timed_launch)]):
        yield


@contextmanager
def _clocks_in_the_model(clocks: Clocks) -> Iterator[None]:
    """Put clocks into the classes of the model: models built inside the `with` block have them."""
    init, forward, logits, sample = Decoder.__init__, Decoder.forward, Decoder.logits, Sampler.sample

    def timed_init(self: Decoder, config: Any, weights: Any) -> None:
        for layer in weights.layers:
            for place in layer.places():
                place.put(clocks.timed(f"{place.field} product", place.get()))
        init(self, config, weights)

    def timed_forward(self: Decoder, token_ids: torch.Tensor, ops: Any) -> torch.Tensor:
        return forward(self, token_ids, _TimedStepOps(ops, clocks))

    patches: list[tuple[Any, str, Any]] = [
        (engine.loading, "can_run", lambda _weights: False),  # one call per operation, not per layer
        (Decoder, "__init__", timed_init),
        (Decoder, "forward", timed_forward),
        (Decoder, "logits", clocks.timed("head product", logits)),
        (Sampler, "sample", clocks.timed("sampling", sample)),
    ]
    with _patched(patches):
        yield


def print_profile(model_dir: Path, *, threads: int, console: Console) -> None:
    """Load the engine here and print a step's parts, in milliseconds, for decode steps and a prefill chunk."""
    torch.set_num_threads(threads)
    model = {"id": str(model_dir), "dtype": "bfloat16", "device": "cpu"}
    pools = {"decode": {"kv_memory_gib": 1, "threads": threads}}
    config = parse_config({"model": model, "pools": pools}, source="profile")
    figures = Figures()
    with console.status("measuring whole steps"):
        _measure(config, Clocks(spent_s=defaultdict(float)), figures, _SERVED)
    clocks = Clocks(spent_s=defaultdict(float))
    with _clocks_in_the_model(clocks), console.status("measuring their parts"):
        _measure(config, clocks, figures, None)
    figures.show(console)


def _measure(config: ServingConfig, clocks: Clocks, figures: Figures, whole: str | None) -> None:
    """Add the steps of each case, on an engine that is loaded now: as a whole under a name, or part by part."""
    steps: list[StepTimes] = []
    with _clock_around_the_step(clocks, steps):
        local = LocalEngine.load(config)
        rng = random.Random(1)
        for case in _CASES:
            for _ in range(2):  # the first time warms up
                steps.clear()
                _generate(local, case, rng)
            for step in _typical(steps, case):
                step_s = sum(step.parts_s.values())
                parts_s = {_STEP: step_s} | step.parts_s if whole is None else {whole: step_s}
                for part, part_s in parts_s.items():
                    figures.add(case.name, "a step", part, ms=1000 * part_s, share_of_the_step=part_s / step_s)


def _generate(local: LocalEngine, case: Case, rng: random.Random) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=case.output_tokens, ignore_eos=True)
    prompts = case.prompts(rng, local.executor.vocab_size)
    for _ in local.stream_all([(prompt, sampling) for prompt in prompts]):
        pass


def _typical(steps: Sequence[StepTimes], case: Case) -> list[StepTimes]:
    """Return the steps of the case's kind: full batches, or full chunks."""
    num_rows = case.num_requests if case.rate is Rate.DECODE else max(step.num_rows for step in steps)
    return [step for step in steps if step.num_rows == num_rows]
