"""Cases, and the rate that follows from the times of the tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from benchmarks.peers.protocol import Output
from common.timing import StepShape
from engine.work import DeviceRates, ModelShape, StepFloors

FIRST_TOKEN_ID = 100
"""Smaller ids are special tokens, in the default model and in most others."""


class Rate(StrEnum):
    """Which tokens per second a case is about."""

    DECODE = "decode"
    """Output tokens, from the first token of the last sequence to start until the first sequence ends."""
    PREFILL = "prefill"
    """Prompt tokens, until every sequence has its first token."""
    MIXED = "mixed"
    """Output tokens, over everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A burst of equal requests."""

    name: str
    rate: Rate
    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def prompts(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        """Return fresh token ids, so that no prefix is ever found in a cache."""
        return [
            [rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_requests)
        ]

    def tokens_per_s(self, outputs: Sequence[Output]) -> float:
        """Return the case's rate."""
        match self.rate:
            case Rate.DECODE:
                return decode_rate(outputs)
            case Rate.PREFILL:
                return self.num_requests * self.prompt_tokens / max(output.times_s[0] for output in outputs)
            case Rate.MIXED:
                return self.num_requests * self.output_tokens / max(output.times_s[-1] for output in outputs)


def decode_rate(outputs: Sequence[Output]) -> float:
    """Return tokens per second while all sequences decode and none is read.

    Every step gives each sequence one token, so the last sequence to start counts the steps until the first one ends.
    """
    last_started = max(outputs, key=lambda output: output.times_s[0])
    # Tokens of one step arrive one after the other: less than half of a step later still is the same step.
    step_s = min(later - earlier for earlier, later in pairwise(last_started.times_s))
    ends_s = min(output.times_s[-1] for output in outputs) + step_s / 2
    steps_s = [time_s for time_s in last_started.times_s if time_s <= ends_s]
    return len(outputs) * (len(steps_s) - 1) / (steps_s[-1] - steps_s[0])


CASES = (
    Case(name="decode 1", rate=Rate.DECODE, num_requests=1, prompt_tokens=32, output_tokens=64),
    Case(name="decode 8", rate=Rate.DECODE, num_requests=8, prompt_tokens=32, output_tokens=64),
    Case(name="decode 32", rate=Rate.DECODE, num_requests=32, prompt_tokens=32, output_tokens=64),
    Case(name="decode 1 at 4k", rate=Rate.DECODE, num_requests=1, prompt_tokens=4096, output_tokens=32),
    Case(name="decode 1 at 8k", rate=Rate.DECODE, num_requests=1, prompt_tokens=8128, output_tokens=32),
    Case(name="prefill 1x1024", rate=Rate.PREFILL, num_requests=1, prompt_tokens=1024, output_tokens=1),
    Case(name="prefill 8x1024", rate=Rate.PREFILL, num_requests=8, prompt_tokens=1024, output_tokens=1),
    Case(name="prefill 1 of 8k", rate=Rate.PREFILL, num_requests=1, prompt_tokens=8128, output_tokens=1),
    Case(name="mixed 16", rate=Rate.MIXED, num_requests=16, prompt_tokens=256, output_tokens=64),
)


def choose_cases(words: Sequence[str]) -> tuple[Case, ...]:
    """Return the cases that the words choose, all without words. Raises ValueError for a stray word.

    A whole name chooses its case, any other word those whose names contain it.
    """
    names = {case.name for case in CASES}
    chosen = set() if words else names
    for word in words:
        found = {word} & names or {name for name in names if word in name}
        if not found:
            raise ValueError(f"no case is called {word!r}; there are {', '.join(case.name for case in CASES)}")
        chosen |= found
    return tuple(case for case in CASES if case.name in chosen)


def best_tokens_per_s(case: Case, model: ModelShape, rates: DeviceRates) -> float:
    """Return the rate of an engine that wastes nothing on this machine, in bfloat16.

    All prompts are read at once, and no step is longer than its floor. A shared host's rates change from minute to
    minute: `rates` are those measured just before the case.
    """
    floors = StepFloors(
        model=model, weight_bytes=model.weight_bytes, kv_bytes_per_token=model.kv_bytes_per_token, rates=rates
    )
    num_requests, num_tokens = case.num_requests, case.prompt_tokens
    prompts = StepShape(
        num_prefill_tokens=num_requests * num_tokens,
        num_prefill_pairs=num_requests * (num_tokens * (num_tokens + 1) // 2),
    )
    context = num_requests * (num_tokens + case.output_tokens // 2)
    prefill_s = floors.step_s(prompts)
    decode_s = floors.step_s(StepShape(num_decodes=num_requests, num_context_tokens=context))
    if case.rate is Rate.DECODE:
        return num_requests / decode_s
    if case.rate is Rate.PREFILL:
        return num_requests * num_tokens / prefill_s
    return num_requests * case.output_tokens / (prefill_s + (case.output_tokens - 1) * decode_s)
