"""Lives of workers, from the start of a process to its end: how each has done lately, and which of them are over."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from common.clock import Clock
from common.errors import TransferError, WorkerError
from common.ids import Epoch, WorkerId

if TYPE_CHECKING:
    from router.fleet.member import Member

Life = tuple[WorkerId, Epoch]
"""One life of a worker."""

T = TypeVar("T")

HALF_LIFE_S = 60.0
"""Time in which the counts of a life's attempts halve."""
NEWS_TIMEOUT_S = 5.0
"""Time that a worker that lost a request is given to answer."""
_MAX_REMEMBERED = 4096


def is_failure(error: BaseException) -> bool:
    """Return whether an error that ended an attempt counts against its worker; refusals and cancellations do not."""
    return isinstance(error, WorkerError | TransferError)


@dataclass(slots=True)
class AttemptCounts:
    """Attempts on one life of a worker that ended, and those that it failed.

    Both counts halve every minute, so that they describe the last minutes without a list of them. The controller adds
    up the counts of all routers, and puts a worker that fails more than its peers on trial (cluster/health/).
    """

    _num_attempts: float = 0.0
    _num_failed: float = 0.0
    _noted_s: float = 0.0

    def note(self, *, now_s: float, num_failed: int = 0) -> None:
        """Count an attempt that ended now; `num_failed` is 1 if the worker failed it."""
        self._num_attempts, self._num_failed = self.counts(now_s)
        self._num_attempts += 1
        self._num_failed += num_failed
        self._noted_s = now_s

    def counts(self, now_s: float) -> tuple[float, float]:
        """Return attempts and failed ones, as of now."""
        decay = 0.5 ** (max(0.0, now_s - self._noted_s) / HALF_LIFE_S)
        return self._num_attempts * decay, self._num_failed * decay


class LifeTracker:
    """Finds out, for requests that lost workers, whether these have ended. Event loop only."""

    def __init__(
        self, members: Mapping[WorkerId, "Member"], until_changed: Callable[[], Awaitable[object]], clock: Clock
    ) -> None:
        """`until_changed` returns after the next change of a member."""
        self._members = members
        self._until_changed = until_changed
        self._clock = clock
        self._seen_s: OrderedDict[Life, float] = OrderedDict()
        """When each life was last known to be ready."""
        self._departed: OrderedDict[Life, None] = OrderedDict()
        """Lives that were ready when their worker left."""

    def of(self, worker_id: WorkerId) -> Life | None:
        """Return the current life of a worker; None when it is unknown."""
        member = self._members.get(worker_id)
        return None if member is None else member.life

    def note_ready(self, life: Life, at_s: float) -> None:
        """Note that a life was ready at a time: no failure before it has ended it."""
        _remember(self._seen_s, life, max(at_s, self._seen_s.get(life, 0.0)))

    def note_departure(self, life: Life) -> None:
        """Note that a worker leaves the membership while it is ready: this does not count as an end."""
        _remember(self._departed, life, None)

    async def find_ended(self, lives: Collection[Life]) -> dict[Life, float]:
        """Return those of these lives that are over, or lost, and when each was last ready.

        The answer comes once every worker concerned has answered or its time is up. A worker that fell silent counts
        only when a new life has begun: it may be stopped or cut off, and that is not the fault of a request. One that
        has left the membership in order, as to change its pool, does not count either.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWS_TIMEOUT_S):
                while any(self._has_ended(life) is None for life in lives):
                    await self._until_changed()
        return {life: self._seen_s.get(life, 0.0) for life in lives if self._has_ended(life) is True}

    def _has_ended(self, life: Life) -> bool | None:
        """Return whether a life is over; None while the worker is asked."""
        worker_id, _epoch = life
        if life in self._departed:
            return False
        if self.of(worker_id) != life:
            return True
        return self._members[worker_id].has_ended


def _remember(found: OrderedDict[Life, T], life: Life, value: T) -> None:
    found[life] = value
    found.move_to_end(life)
    if len(found) > _MAX_REMEMBERED:
        found.popitem(last=False)
