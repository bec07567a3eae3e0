"""Requests with known answers."""

import random
from dataclasses import dataclass

from common.block_hash import hash_blocks, hash_root
from common.clock import ManualClock
from common.ids import RequestId
from common.sampling import SamplingParams
from common.tokens import TokenArray, as_tokens
from engine.core import EngineCore
from engine.events import EngineEvent, Failed, FinishReason, Tokens
from engine.fake import FakeExecutor
from engine.group import Group
from engine.scheduler import SchedulerLimits
from engine.sequence import EngineRequest

_NUM_QUESTIONS = 60
_NUM_PREFIXES = 6
_MAX_OUTPUT = 24


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

    def __init__(self, draw: random.Random, *, block_size: int) -> None:
        self._draw = draw
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
        sampling = SamplingParams(
            temperature=0.8 if is_sampled else 0.0,
            seed=abs(number),
            n=num_samples or (draw.choice((1, 2, 3)) if is_sampled else 1),
            max_tokens=draw.randrange(1, _MAX_OUTPUT),
            detokenize=draw.random() < 0.5,
        )
        answers, reasons = ask(prompt, sampling, block_size=self._block_size)
        return Question(prompt=prompt, sampling=sampling, answers=answers, reasons=reasons)


def ask(
    prompt: TokenArray, sampling: SamplingParams, *, block_size: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[FinishReason, ...]]:
    """Return the answers of an idle fake engine, and why each sample ends."""
    executor = FakeExecutor(num_blocks=256, block_size=block_size)
    limits = SchedulerLimits(block_size=block_size, max_step_tokens=256, max_running=16, max_waiting=1)
    core = EngineCore(executor, limits, ManualClock())
    root = hash_root(model_fingerprint=executor.kv.shape.fingerprint)
    answers: list[list[int]] = [[] for _ in range(sampling.n)]
    reasons: dict[int, FinishReason] = {}

    def take(event: EngineEvent) -> None:
        assert not isinstance(event, Failed), event
        for output in event.tokens if isinstance(event, Tokens) else ():
            answers[output.sample_index].append(output.token_id)
            if output.finish_reason is not None:
                reasons[output.sample_index] = output.finish_reason

    request = EngineRequest(
        request_id=RequestId("question"),
        prompt_token_ids=prompt,
        sampling=sampling,
        hash_root=root,
        block_hashes=hash_blocks(prompt, root=root, block_size=block_size),
    )
    group = core.add(request, take)
    assert isinstance(group, Group), group
    while core.has_work:
        for told, event in core.step():
            told.sink(event)
    return tuple(map(tuple, answers)), tuple(reasons[i] for i in range(sampling.n))
