"""One attempt at a plan, and what attempts of every kind note of their calls.

What an attempt calls depends on what is asked for (generation_attempt.py, embedding_attempt.py). Its calls belong to
it: when one fails, or the client goes away, the others are closed in the same turn.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from common.errors import AccessDenied, KvrelayError, Unauthenticated, WorkerError
from common.lifecycle import LifeCycle, State
from kvrelay.v1 import decode_pb2, inference_pb2, prefill_pb2
from router.fleet.booking import WorkerBooking
from router.fleet.decisions import plan_to_proto
from router.fleet.worker_client import Incoming
from router.requests.worker_requests import WorkerRequests

_Response = TypeVar("_Response")


class AttemptFailed(Exception):
    """A worker's call failed, or a worker broke the protocol."""

    def __init__(self, worker: WorkerBooking, error: KvrelayError) -> None:
        super().__init__(f"{worker.member.endpoint.worker_id}: {error.message}")
        self.worker = worker
        self.error = error


class AttemptOutcome(enum.Enum):
    """How an attempt that did not fail ended."""

    COMPLETED = "completed"
    """Every sample has ended."""
    MOVED = "moved"
    """The decode worker is leaving; the rest of the answer needs another plan."""
    SET_BACK = "set back"
    """Its room goes to another tenant's request; the rest of the answer waits in line for another plan."""


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt(WorkerRequests, ABC):
    """Runs one booked plan for some samples of a request."""

    _num_gaps_before: int = 0
    """Gaps between tokens up to the first token of this attempt."""

    @property
    def life(self) -> LifeCycle:
        """Life cycle of these samples; the request's own for its leading ones."""
        return self.group.life

    @property
    def number(self) -> int:
        """Number of the attempt, from 1 on."""
        return self.group.num_attempts

    async def run(self) -> AttemptOutcome:
        """Deliver the missing tokens of the samples. Raises AttemptFailed."""
        try:
            return await self._run()
        except AttemptFailed as failure:
            self.record.compile_s += failure.error.spent_s
            raise
        finally:
            decision = self.booking.decision
            if decision.ttft_s is not None:
                decision.tpot_s = self.record.ledger.mean_gap_s(skip=self._num_gaps_before)

    @abstractmethod
    async def _run(self) -> AttemptOutcome:
        """Make the calls and deliver what they bring. Raises AttemptFailed."""

    def _send_plan(self) -> None:
        """Send the client the plan, now that a worker has accepted it."""
        self.record.num_attempts = max(self.record.num_attempts, self.number)
        chosen = plan_to_proto(self.booking.decision, attempt=self.number)
        chosen.shortened_max_tokens = self.record.shortened_max_tokens or 0
        self.record.outbox.put(inference_pb2.GenerateResponse(plan=chosen))

    def _note_started(self, started: prefill_pb2.PrefillStarted | decode_pb2.LocalPrefillStarted) -> None:
        self._enter_prefilling()
        self.services.metrics.compare_cached_tokens(
            predicted=self.booking.plan.predicted_cached_tokens, actual=started.num_cached_tokens
        )
        self.booking.decision.num_cached_tokens = started.num_cached_tokens
        if not self.record.ledger.has_tokens:
            # When another router began the answer, output tokens may be cached, too; when an attempt has failed, what
            # it had computed. That is not found, but written.
            worker_id = (self.booking.prefill or self.booking.answering).member.endpoint.worker_id
            num_found = self.record.num_found_on.setdefault(worker_id, started.num_cached_tokens)
            num_cached_tokens = min(started.num_cached_tokens, num_found, len(self.record.job.prompt_token_ids))
            self.record.num_cached_tokens = num_cached_tokens
            self.record.num_pulled_tokens = min(started.num_pulled_tokens, num_cached_tokens)
            self.services.admission.correct_cached(self.record.ticket, num_cached_tokens)

    def _note_pinned(self, num_pinned_tokens: int) -> None:
        """Note what a worker has pinned, for the request and for the decision."""
        if not self.record.job.marks:
            return
        decision, record = self.booking.decision, self.record
        record.note_pinned(num_pinned_tokens)
        decision.num_pinned_tokens = record.num_pinned_tokens
        decision.num_refused_pin_tokens = record.num_refused_pin_tokens

    def _note_first_token(self) -> None:
        """Note the time of the attempt's first token; gaps between tokens count from here on."""
        decision = self.booking.decision
        if decision.ttft_s is None and self.record.ledger.has_tokens:  # beams have none before their end
            decision.ttft_s = self.record.clock.monotonic() - decision.decided_s
            self._num_gaps_before = len(self.record.ledger.gaps)

    def _enter_prefilling(self) -> None:
        if self.life.state is State.RESERVING:
            self.life.advance(State.PREFILLING)

    def _unfinished(self) -> list[int]:
        return self.record.ledger.unfinished(self.samples)

    def _time_left_s(self) -> float:
        return max(self.record.life.left_s, 0.001)


@contextmanager
def blaming(worker: WorkerBooking) -> Iterator[None]:
    """Raise AttemptFailed with this worker for any KvrelayError of the block.

    A worker that does not accept this router, or another worker, is the cluster's trouble, such as a clock that was
    set: never the client's, whose own key has been accepted.
    """
    try:
        yield
    except (Unauthenticated, AccessDenied) as error:
        raise AttemptFailed(
            worker, WorkerError(f"workers and routers do not trust each other: {error.message}")
        ) from error
    except KvrelayError as error:
        raise AttemptFailed(worker, error) from error


async def receive(answer: Incoming[_Response], worker: WorkerBooking) -> _Response | None:
    """Return the next message of a worker's call, None at its good end. Raises AttemptFailed."""
    with blaming(worker):
        response = await answer.receive()
    worker.has_answered = True
    return response
