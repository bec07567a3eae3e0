"""Checks of a chaotic run: of every answer, and of the cluster at the end."""

from collections.abc import Iterable

from common.tokens import tokens_from_bytes
from kvrelay.client.events import SampleSoFar
from kvrelay.v1 import inference_pb2, sampling_pb2
from measure.simulate.chaos.questions import Question
from measure.simulate.worker import SimWorker
from router.parts import RouterParts
from worker.output import FINISH_REASONS


class Violation(AssertionError):
    """An invariant is broken."""


class AnswerCheck:
    """Checks one request's messages. Raises Violation at the first wrong one."""

    def __init__(self, question: Question) -> None:
        self.question = question
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

    @property
    def num_tokens(self) -> int:
        """Tokens that the client has."""
        return sum(self._num_tokens)

    def so_far(self) -> tuple[SampleSoFar, ...]:
        """Return what the client has of the samples; nothing before the first token."""
        if not self.num_tokens:
            return ()
        counts = zip(self.question.answers, self._num_tokens, self._is_finished, strict=True)
        return tuple(SampleSoFar(token_ids=tuple(answer[:num]), is_finished=done) for answer, num, done in counts)

    def num_tokens_of(self, sample_index: int) -> int:
        """Return the tokens of one sample that the client has."""
        return self._num_tokens[sample_index]

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
        answer = self.question.answers[sample_index]
        if first_index != seen or self._is_finished[sample_index]:
            raise Violation(f"sample {sample_index}: token {first_index} came behind {seen} tokens")
        got = tuple(token_ids)
        if got != answer[seen : seen + len(got)]:
            raise Violation(f"sample {sample_index}: {got} at {seen}; an undisturbed engine says {answer[seen:]}")
        self._num_tokens[sample_index] += len(got)
        if reason:
            self._is_finished[sample_index] = True
            expected = FINISH_REASONS[self.question.reasons[sample_index]]
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
            bookings=len(router.fleet.bookings),
            bookings_of_workers=sum(len(member.bookings) for member in router.fleet.members),
            queued=router.line.num_queued,
            active=router.admission.num_active,
            request_tasks=router.orchestrator.num_request_tasks,
        )
    return found
