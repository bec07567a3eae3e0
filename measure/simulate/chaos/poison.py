"""Poison: requests that end every worker that computes a certain token of their answer. And all deaths, by cause."""

import math
from collections import Counter
from collections.abc import Callable, Iterable

from common.clock import Clock
from common.ids import RequestId
from engine.executor import ScheduledSequence


class PoisonBook:
    """Poison requests, and the workers that each has ended. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._token_index: dict[RequestId, int] = {}
        self._num_tokens: dict[RequestId, Callable[[], int]] = {}
        self._deaths: dict[RequestId, Counter[int]] = {}
        self._all_deaths: list[tuple[float, RequestId | None]] = []
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

    def note_death(self, cause: RequestId | None) -> None:
        """Note the end of a process, or of its ability to answer, and the request that has ended it."""
        self._all_deaths.append((self._clock.monotonic(), cause))

    def may_be_bad_luck(self, since_s: float, *, max_lost: int) -> bool:
        """Return whether so many workers have ended since a time that an innocent request may have lost too many.

        Those that one poison request has ended are no excuse by themselves: quarantine keeps others from them.
        """
        causes = Counter(cause for at_s, cause in self._all_deaths if at_s >= since_s)
        most_by_one = max((count for cause, count in causes.items() if cause is not None), default=0)
        return causes.total() >= max_lost and causes.total() > most_by_one

    def num_deaths(self, request_id: RequestId) -> int:
        """Return how many workers a request has ended, at most, without a new token for its client in between."""
        return max(self._deaths[request_id].values(), default=0)

    @property
    def num_all_deaths(self) -> int:
        """Workers that all requests together have ended."""
        return sum(deaths.total() for deaths in self._deaths.values())
