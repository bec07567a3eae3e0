"""Poison: requests that end every worker that computes a certain token of their answer. And all deaths, by cause."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.clock import Clock
from common.ids import RequestId
from engine.executor import ScheduledSequence
from measure.simulate.chaos.settings import MAX_ANSWER_S, MAX_NOTICE_S
from router.fleet.decisions import DecisionRecord


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process, or of its ability to answer."""

    worker_id: str
    at_s: float
    cause: RequestId | None


class PoisonBook:
    """Poison requests, and the workers that each has ended. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._token_index: dict[RequestId, int] = {}
        self._num_tokens: dict[RequestId, Callable[[], int]] = {}
        self._deaths: dict[RequestId, Counter[int]] = {}
        self._all_deaths: list[Death] = []
        self._running: dict[RequestId, None] = {}
        self._quiet_s = -math.inf

    def add(self, request_id: RequestId, token_index: int, *, num_tokens: Callable[[], int]) -> None:
        """Make a request poison; with index 0 it ends workers during its prefill.

        `num_tokens` returns how many tokens its client has.
        """
        self._token_index[request_id] = token_index
        self._num_tokens[request_id] = num_tokens
        self._deaths[request_id] = Counter()
        self._running[request_id] = None

    def end(self, request_id: RequestId) -> None:
        """Note the end of a poison request."""
        del self._running[request_id]
        self._quiet_s = self._clock.monotonic()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last poison request ended; 0 while one runs."""
        return 0.0 if self._running else self._clock.monotonic() - self._quiet_s

    def is_poison(self, request_id: RequestId) -> bool:
        """Return whether a request is poison."""
        return request_id in self._token_index

    def strikes(self, batch: Iterable[ScheduledSequence]) -> RequestId | None:
        """Return the request that ends the process in the step of a batch, and count that; None without one."""
        for item in batch:
            request_id = item.sequence.request.request_id
            if item.num_samples and self._token_index.get(request_id) == item.token_index:
                self._deaths[request_id][self._num_tokens[request_id]()] += 1
                return request_id
        return None

    def note_death(self, worker_id: str, cause: RequestId | None) -> None:
        """Note the end of a process, or of its ability to answer, and the request that has ended it."""
        self._all_deaths.append(Death(worker_id, self._clock.monotonic(), cause))

    def may_be_bad_luck(self, attempts: Iterable[DecisionRecord], *, max_lost: int) -> bool:
        """Return whether an innocent request has lost so many workers in these attempts that it may be refused.

        An attempt is lost when one of its workers has ended since; it may have been stopped or cut off before. Those
        that one poison request alone has ended do not excuse it: quarantine keeps others from them.
        """
        lost = [causes for attempt in attempts if (causes := self._causes(attempt))]
        is_by_one = any(all(causes == {cause} for causes in lost) for cause in set().union(*lost) - {None})
        return len(lost) >= max_lost and not is_by_one

    def _causes(self, attempt: DecisionRecord) -> set[RequestId | None]:
        """Return what has ended workers of an attempt since it began, or so shortly before that no router knew."""
        workers, since_s = (attempt.plan.answering, attempt.plan.prefill), attempt.decided_s - MAX_NOTICE_S
        return {each.cause for each in self._all_deaths if each.worker_id in workers and each.at_s >= since_s}

    def ended_at_once(self, request_id: RequestId, attempts: Iterable[DecisionRecord]) -> bool:
        """Return whether a poison request may have ended a worker before its router had an answer to the call."""
        return any(
            death.cause == request_id and death.at_s - attempt.decided_s <= MAX_ANSWER_S
            for attempt in attempts
            for death in self._all_deaths
            if death.worker_id in (attempt.plan.answering, attempt.plan.prefill) and death.at_s >= attempt.decided_s
        )

    def num_deaths(self, request_id: RequestId) -> int:
        """Return how many workers a request has ended, at most, without a new token for its client in between."""
        return max(self._deaths[request_id].values(), default=0)

    @property
    def num_all_deaths(self) -> int:
        """Workers that all requests together have ended."""
        return sum(deaths.total() for deaths in self._deaths.values())
