"""Drafts of a chosen quality, verified whatever they cost."""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import mul

from common.tokens import as_tokens
from engine.plan import StepPlan
from engine.sequence import Sequence as EngineSequence
from engine.speculation.costs import MIN_STEPS
from engine.speculation.drafter import Draft, Drafter
from engine.speculation.speculator import Rule, Speculator

MANY_ROWS = 10_000


class GuessingDrafter:
    """A `Drafter` that knows the answers, and guesses each token right with some probability."""

    def __init__(self, answer_of: Callable[[EngineSequence], Sequence[int]], *, rate: float, seed: int = 0) -> None:
        self._answer_of = answer_of
        self._rate = rate
        self._draw = random.Random(seed)

    def draft(self, sequence: EngineSequence, max_tokens: int) -> Draft:
        """Return the next tokens of the answer; wrong ones are the right ones of another place."""
        answer = self._answer_of(sequence)
        right = answer[sequence.num_output_tokens :][: max(0, max_tokens)]
        guesses = [each if self._draw.random() < self._rate else self._draw.choice(answer) for each in right]
        return Draft(token_ids=as_tokens(guesses), chances=list(accumulate(repeat(0.99, len(guesses)), mul)))

    def forget(self, sequence: EngineSequence) -> None:
        """Keep nothing."""


def eager(drafter: Drafter, *, num_tokens: int = 5, rule: Rule = Rule.COUPLED) -> Speculator:
    """Return a speculator that has every draft verified: to it, rows are as cheap as they can be, and drafts right."""
    speculator = Speculator(drafter, num_tokens=num_tokens, rule=rule)
    for num_rows in range(1, 2 * MIN_STEPS):
        plan = StepPlan(num_tokens=(rows := 1 if num_rows % 2 else MANY_ROWS), num_decodes=rows)
        speculator.observe(plan, [], 1.0)
    return speculator
