"""Drafts of a chosen quality, verified whatever they cost."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import mul

from common.tokens import TokenArray, as_tokens
from engine.executor import StepResult
from engine.plan import StepPlan
from engine.sequence import Sequence as EngineSequence
from engine.speculation.costs import MIN_STEPS
from engine.speculation.drafter import Drafter
from engine.speculation.speculator import Rule, Speculator

MANY_ROWS = 10_000


class GuessingDrafter:
    """A `Drafter` that knows the answers, and guesses each token right with some probability."""

    def __init__(self, answer_of: Callable[[EngineSequence], Sequence[int]], *, rate: float, seed: int = 0) -> None:
        self._answer_of = answer_of
        self._rate = rate
        self._draw = random.Random(seed)

    def prospects(self, sequence: EngineSequence, max_tokens: int) -> list[float]:
        """Return that it is nearly sure of the rest of the answer."""
        num_left = len(self._answer_of(sequence)) - sequence.num_output_tokens
        return list(accumulate(repeat(0.99, max(0, min(max_tokens, num_left))), mul))

    def draft(self, wanted: Mapping[EngineSequence, int]) -> dict[EngineSequence, TokenArray]:
        """Return the next tokens of the answers; wrong ones are the right ones of another place."""
        return {sequence: self._guess(sequence, num_tokens) for sequence, num_tokens in wanted.items()}

    def _guess(self, sequence: EngineSequence, num_tokens: int) -> TokenArray:
        answer = self._answer_of(sequence)
        right = answer[sequence.num_output_tokens :][:num_tokens]
        return as_tokens([each if self._draw.random() < self._rate else self._draw.choice(answer) for each in right])

    def costs_s(self, num_sequences: int, num_tokens: int) -> None:
        """Take no time."""

    def observe(self, sequence: EngineSequence, num_drafted: int, result: StepResult) -> None:
        """Learn nothing."""

    def forget(self, sequence: EngineSequence) -> None:
        """Keep nothing."""


def draft_of(drafter: Drafter, sequence: EngineSequence, num_tokens: int) -> list[int]:
    """Return a drafter's next draft for a sequence, after it has looked at its tokens."""
    num_tokens = len(drafter.prospects(sequence, num_tokens))
    return list(drafter.draft({sequence: num_tokens})[sequence]) if num_tokens else []


def eager(drafter: Drafter, *, num_tokens: int = 5, rule: Rule = Rule.COUPLED) -> Speculator:
    """Return a speculator that has every draft verified: to it, rows are as cheap as they can be, and drafts right."""
    speculator = Speculator(drafter, num_tokens=num_tokens, rule=rule)
    for num_rows in range(1, 2 * MIN_STEPS):
        plan = StepPlan(num_tokens=(rows := 1 if num_rows % 2 else MANY_ROWS), num_decodes=rows)
        speculator.observe(plan, [], 1.0)
    return speculator
