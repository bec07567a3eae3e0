"""Requests with known answers."""

import random
from dataclasses import dataclass

import numpy as np

from common.fake_tokenizer import EOS_TOKEN_ID
from common.sampling import SamplingParams
from common.tokens import TokenArray, as_tokens
from common.wire_names import FinishReason
from engine.fake_model import choose, context_state, token_kv

_NUM_QUESTIONS = 60
_NUM_PREFIXES = 6
_MAX_OUTPUT = 24
_LONG_OUTPUT = 60
"""Tokens of a long answer: it goes on for a quarter of a second after its client has left."""
_LONG_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, its sampling parameters, and the correct answer."""

    prompt: TokenArray
    sampling: SamplingParams
    answers: tuple[tuple[int, ...], ...]
    """Token ids of each sample."""
    reasons: tuple[FinishReason, ...]
    """Finish reason of each sample."""


class QuestionBook:
    """A fixed number of questions that share prefixes; some ask for text, some for several samples."""

    def __init__(self, draw: random.Random, *, block_size: int, has_long_answers: bool = True) -> None:
        self._draw = draw
        self._has_long_answers = has_long_answers
        self._block_size = block_size
        self._prefixes = [self._tokens(block_size * draw.randrange(1, 9)) for _ in range(_NUM_PREFIXES)]
        self._num_fresh = 0
        self._questions = [self._question(number) for number in range(_NUM_QUESTIONS)]

    def draw(self) -> Question:
        """Return a random question."""
        return self._draw.choice(self._questions)

    def fresh(self) -> Question:
        """Return a question that was never asked before, for one sample."""
        self._num_fresh += 1
        return self._question(-self._num_fresh, num_samples=1)

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(32, 127) for _ in range(count)]

    def _question(self, number: int, *, num_samples: int | None = None) -> Question:
        draw = self._draw
        num_own_tokens = draw.randrange(1, 2 * self._block_size) if number >= 0 else 2 * self._block_size
        prompt = as_tokens(draw.choice(self._prefixes) + self._tokens(num_own_tokens))
        is_sampled = draw.random() < 0.3
        is_long = self._has_long_answers and number >= 0 and number % _LONG_EVERY == 0
        sampling = SamplingParams(
            temperature=0.8 if is_sampled else 0.0,
            seed=abs(number),
            n=num_samples or (draw.choice((1, 2, 3)) if is_sampled and not is_long else 1),
            max_tokens=_LONG_OUTPUT if is_long else draw.randrange(1, _MAX_OUTPUT),
            detokenize=draw.random() < 0.5,
        )
        answers, reasons = ask(prompt, sampling)
        return Question(prompt=prompt, sampling=sampling, answers=answers, reasons=reasons)


def ask(prompt: TokenArray, sampling: SamplingParams) -> tuple[tuple[tuple[int, ...], ...], tuple[FinishReason, ...]]:
    """Return the answers of the fake engine by its definition, without pages and steps, and why each sample ends."""
    prompt_kv = [token_kv(token_id, position) for position, token_id in enumerate(prompt)]
    answers: list[tuple[int, ...]] = []
    reasons: list[FinishReason] = []
    for sample_index in range(sampling.n):
        kv, answer = np.array(prompt_kv + [0] * sampling.max_tokens, np.uint64), list[int]()
        while len(answer) < sampling.max_tokens and EOS_TOKEN_ID not in answer[-1:]:
            end, index = len(prompt) + len(answer), len(answer)
            state = context_state(kv[:end])
            answer.append(choose(sampling, state, sample_index=sample_index, index=index).token_id)
            kv[end] = token_kv(answer[-1], end)
        answers.append(tuple(answer))
        reasons.append(FinishReason.STOP if answer[-1] == EOS_TOKEN_ID else FinishReason.LENGTH)
    return tuple(answers), tuple(reasons)
