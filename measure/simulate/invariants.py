"""Requests with known answers, and the checks of a chaotic run: of every answer, and of the cluster at the end."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from common.block_hash import hash_blocks, hash_root
from common.clock import ManualClock
from common.ids import RequestId
from common.sampling import SamplingParams
from common.tokens import TokenArray, as_tokens, tokens_from_bytes
from engine.core import EngineCore
from engine.events import EngineEvent, Failed, FinishReason, Tokens
from engine.fake import FakeExecutor
from engine.group import Group
from engine.scheduler import SchedulerLimits
from engine.sequence import EngineRequest
from kvrelay.v1 import inference_pb2, sampling_pb2
from measure.simulate.worker import SimWorker
from router.parts import RouterParts
from worker.output import FINISH_REASONS

_NUM_QUESTIONS = 200
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
        self._questions = [self._question(number) for number in range(_NUM_QUESTIONS)]

    def draw(self) -> Question:
        """Return a random question."""
        return self._draw.choice(self._questions)

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(32, 127) for _ in range(count)]

    def _question(self, number: int) -> Question:
        draw = self._draw
        prompt = as_tokens(draw.choice(self._prefixes) + self._tokens(draw.randrange(1, 2 * self._block_size)))
        is_sampled = draw.random() < 0.3
        sampling = SamplingParams(
            temperature=0.8 if is_sampled else 0.0,
            seed=number,
            n=draw.choice((1, 2, 3)) if is_sampled else 1,
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


class Violation(AssertionError):
    """An invariant is broken."""


class AnswerCheck:
    """Checks one request's messages. Raises Violation at the first wrong one."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._num_tokens = [0] * len(question.answers)
        self._is_finished = [False] * len(question.answers)
        self._is_complete = False

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        """Check a message against those before it, and its tokens against the answer."""
        if self._is_complete:
            raise Violation("a message came behind the terminal one")
        match message.WhichOneof("event"):
            case "tokens":
                for token in message.tokens.tokens:
                    self._token(token.sample_index, token.token_index, [token.token_id], token.finish_reason)
                for run in message.tokens.runs:
                    tokens = tokens_from_bytes(run.tokens)
                    self._token(run.sample_index, run.first_token_index, tokens, run.finish_reason)
            case "completed":
                self._is_complete = True
                if not all(self._is_finished):
                    raise Violation(f"completed after {self._num_tokens} tokens")

    def end_well(self) -> None:
        """Check the end of a stream without an error."""
        if not self._is_complete:
            raise Violation("the stream ended without a terminal message")

    def end_badly(self) -> None:
        """Check the end of a stream with an error."""
        if self._is_complete:
            raise Violation("an error came behind the terminal message")

    def _token(
        self,
        sample_index: int,
        first_index: int,
        token_ids: Iterable[int],
        reason: "sampling_pb2.FinishReason.ValueType",
    ) -> None:
        seen = self._num_tokens[sample_index]
        answer = self._question.answers[sample_index]
        if first_index != seen or self._is_finished[sample_index]:
            raise Violation(f"sample {sample_index}: token {first_index} came behind {seen} tokens")
        got = tuple(token_ids)
        if got != answer[seen : seen + len(got)]:
            raise Violation(f"sample {sample_index}: {got} at {seen}; an undisturbed engine says {answer[seen:]}")
        self._num_tokens[sample_index] += len(got)
        if reason:
            self._is_finished[sample_index] = True
            expected = FINISH_REASONS[self._question.reasons[sample_index]]
            if self._num_tokens[sample_index] != len(answer) or reason != expected:
                raise Violation(f"sample {sample_index} ended with {reason} after {self._num_tokens[sample_index]}")


def leftovers(workers: Iterable[SimWorker], routers: Iterable[RouterParts]) -> list[str]:
    """Return all resources that are still held after all requests have ended; empty if all is well."""
    found: list[str] = []

    def expect_none(who: str, **counts: int) -> None:
        found.extend(f"{who}: {name} is {count}" for name, count in counts.items() if count)

    for worker in workers:
        runtime, core = worker.runtime, worker.engine.core
        pool, scheduler = core.pool, core.scheduler
        expect_none(
            runtime.worker_id,
            used_blocks=pool.num_used,
            missing_blocks=pool.num_blocks - pool.num_used - pool.num_free,
            references=sum(pool.ref_count(block_id) for block_id in range(pool.num_blocks)),
            lost_cached_blocks=len(pool.snapshot().stored) - pool.num_cached_blocks,
            sequences=sum(map(len, (scheduler.waiting, scheduler.running, scheduler.reserved, scheduler.held))),
            steps_in_flight=core.num_steps_in_flight,
            leases=runtime.handoffs.num_leases,
            request_tasks=runtime.num_request_tasks,
        )
    for number, router in enumerate(routers):
        expect_none(
            f"router {number}",
            bookings=router.fleet.num_bookings,
            queued=router.admission.num_queued,
            active=router.admission.num_active,
            request_tasks=router.orchestrator.num_request_tasks,
        )
    return found
