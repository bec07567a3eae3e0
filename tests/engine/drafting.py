"""Drafts of a chosen quality, verified whatever they cost."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import mul

from common.tokens import TokenArray, as_tokens
from engine.core import EngineCore
from engine.events import TokenOutput
from engine.executor import ScheduledSequence, StepResult
from engine.request import EngineRequest
from engine.sequence import Sequence as EngineSequence
from engine.speculation.costs import MIN_STEPS
from engine.speculation.drafter import Drafter
from engine.steps.plan import StepPlan
from engine.steps.speculator import Rule, Speculator
from tests.builders import BLOCK_SIZE, Collector, assert_empty, make_request, run_until_idle, submit

MANY_ROWS = 10_000


class GuessingDrafter:
    """A `Drafter` that knows the answers, and guesses each token right with some probability."""

    def __init__(
        self,
        answer_of: Callable[[EngineSequence], Sequence[int]],
        *,
        rate: float,
        seed: int = 0,
        num_branches: int = 0,
    ) -> None:
        self._num_branches = num_branches
        self._answer_of = answer_of
        self._rate = rate
        self._draw = random.Random(seed)

    def prospects(self, sequence: EngineSequence, max_tokens: int) -> list[list[float]]:
        """Return that it is nearly sure of the rest of the answer, in every branch."""
        num_left = len(self._answer_of(sequence)) - sequence.num_output_tokens
        chances = list(accumulate(repeat(0.99, max(0, min(max_tokens, num_left))), mul))
        return [chances[self._draw.randrange(len(chances) + 1) if i else 0 :] for i in range(1 + self._num_branches)]

    def draft(self, wanted: Mapping[EngineSequence, Sequence[int]]) -> dict[EngineSequence, list[TokenArray]]:
        """Return the next tokens of the answers; wrong ones are the right ones of another place.

        Branches leave the first draft anywhere.
        """
        return {sequence: self._guesses(sequence, lens) for sequence, lens in wanted.items()}

    def _guesses(self, sequence: EngineSequence, lens: Sequence[int]) -> list[TokenArray]:
        first = self._guess(sequence, 0, lens[0])
        paths = [first]
        for num_tokens in lens[1:]:
            depth = self._draw.randrange(max(1, lens[0] - num_tokens + 1))
            paths.append(first[:depth] + self._guess(sequence, depth, num_tokens))
        return paths

    def _guess(self, sequence: EngineSequence, depth: int, num_tokens: int) -> TokenArray:
        answer = self._answer_of(sequence)
        right = answer[sequence.num_output_tokens + depth :][:num_tokens]
        return as_tokens([each if self._draw.random() < self._rate else self._draw.choice(answer) for each in right])

    def costs_s(self, num_sequences: int, num_tokens: int) -> None:
        """Take no time."""

    def observe(self, item: ScheduledSequence, result: StepResult) -> None:
        """Learn nothing."""

    def forget(self, sequence: EngineSequence) -> None:
        """Keep nothing."""


def draft_of(drafter: Drafter, sequence: EngineSequence, num_tokens: int) -> list[int]:
    """Return a drafter's next draft for a sequence, after it has looked at its tokens."""
    return next(iter(drafts_of(drafter, sequence, num_tokens)), [])


def drafts_of(drafter: Drafter, sequence: EngineSequence, num_tokens: int) -> list[list[int]]:
    """Return a drafter's next drafts for a sequence, likeliest first."""
    lens = [*map(len, drafter.prospects(sequence, num_tokens))]
    return [*map(list, drafter.draft({sequence: lens})[sequence])] if any(lens) else []


def eager(drafter: Drafter, *, num_tokens: int = 5, rule: Rule = Rule.COUPLED) -> Speculator:
    """Return a speculator that has every draft verified: to it, rows are as cheap as they can be, and drafts right."""
    speculator = Speculator(drafter, num_tokens=num_tokens, rule=rule)
    for num_rows in range(1, 2 * MIN_STEPS):
        plan = StepPlan(num_tokens=(rows := 1 if num_rows % 2 else MANY_ROWS), num_decodes=rows)
        speculator.observe(plan, [], 1.0)
    return speculator


def outputs_of(core: EngineCore, requests: Sequence[EngineRequest]) -> list[list[TokenOutput]]:
    """Serve requests in one batch and return the outputs of each, by sample."""
    collectors: list[Collector] = [submit(core, request)[1] for request in requests]
    run_until_idle(core)
    assert_empty(core)
    return [sorted(each.outputs, key=lambda output: (output.sample_index, output.token_index)) for each in collectors]


def a_sequence(length: int = 100) -> EngineSequence:
    """Return a sequence of a prompt of that many tokens, without pages."""
    return EngineSequence.from_request(make_request(range(length)), block_size=BLOCK_SIZE, order=0)
