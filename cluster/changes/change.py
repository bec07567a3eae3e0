"""A change of a running cluster: its life, its place behind others, its cancellation.

    WAITING ──▶ RUNNING ──▶ DONE, FAILED
       │           │
       └────┬──────┘
            ▼
        CANCELLING ──▶ CANCELLED; DONE if it was too late; FAILED if what was begun could not be undone

Changes that touch a pool in common run one after the other, in the order in which they were asked for; others run side
by side. A change waits only for earlier ones, so no two wait for each other. It goes on without its caller.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from enum import StrEnum
from functools import partial

from cluster.processes.plan import ProcessRole
from common.clock import Clock, SystemClock
from common.errors import Cancelled, InvalidRequest
from common.lifecycle import IllegalTransition

logger = logging.getLogger(__name__)

_NUM_KEPT = 50
_CLOSE_S = 15.0
"""Time for cancelled changes to end when the cluster stops: to kill what they have half started."""


class ChangeKind(StrEnum):
    """Origin of a change."""

    SCALE = "scale"
    RESTART = "restart"
    ROLLOUT = "rollout"
    PLANNER = "planner"


class ChangeState(StrEnum):
    """The life of a change."""

    WAITING = "waiting"
    """Earlier changes of the same pools have to end first."""
    RUNNING = "running"
    CANCELLING = "cancelling"
    """The change was asked to end: it removes what it has half started, or goes back."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether nothing more happens."""
        return not _NEXT[self]


_NEXT = {
    ChangeState.WAITING: frozenset({ChangeState.RUNNING, ChangeState.CANCELLING}),
    ChangeState.RUNNING: frozenset({ChangeState.CANCELLING, ChangeState.DONE, ChangeState.FAILED}),
    ChangeState.CANCELLING: frozenset({ChangeState.CANCELLED, ChangeState.DONE, ChangeState.FAILED}),
    ChangeState.DONE: frozenset[ChangeState](),
    ChangeState.FAILED: frozenset[ChangeState](),
    ChangeState.CANCELLED: frozenset[ChangeState](),
}


class ClusterChange:
    """One change. `advance` is the only writer of its state. Event loop only."""

    def __init__(self, number: int, kind: ChangeKind, description: str, pools: Collection[ProcessRole]) -> None:
        self.id = number
        self.kind = kind
        self.description = description
        self.pools = frozenset(pools)
        self.state = ChangeState.WAITING
        self.waits_for: tuple[ClusterChange, ...] = ()
        """Earlier changes of its pools; those that have ended do not count any more."""
        self.begun_s = 0.0
        self.begun_unix_s = 0.0
        self.ended_s: float | None = None
        self.error: Exception | None = None
        """Why it failed."""
        self.steps: list[str] = []
        self._changed = asyncio.Event()
        """Set, and replaced, with every step and at the end."""

    def __str__(self) -> str:
        """Return the change for messages: its id, kind and description."""
        return f"change {self.id} ({self.kind} {self.description})"

    def advance(self, to: ChangeState) -> None:
        """Enter a state. Raises IllegalTransition."""
        if to not in _NEXT[self.state]:
            raise IllegalTransition(f"{self}: {self.state} -> {to}")
        self.state = to
        self._notify()

    def report(self, step: str) -> None:
        """Note a step, for the log and for `follow`."""
        logger.info("change: %s", step, extra={"change": self.id})
        self.steps.append(step)
        self._notify()

    async def follow(self, *, after: int = 0) -> AsyncIterator[str]:
        """Yield each step but the first `after`, until it has ended. Raises nothing, also if the change fails."""
        num_seen = after
        while True:
            changed = self._changed
            for step in self.steps[num_seen:]:
                num_seen += 1
                yield step
            if num_seen == len(self.steps):
                if self.state.is_end:
                    return
                await changed.wait()

    async def result(self) -> None:
        """Wait until it has ended. Raises what it failed with, or Cancelled."""
        while not self.state.is_end:
            await self._changed.wait()
        if self.error is not None:
            raise self.error
        if self.state is ChangeState.CANCELLED:
            raise Cancelled(": ".join([f"change {self.id} was cancelled", *self.steps[-1:]]))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Changes:
    """The changes of one cluster: those that run and wait, and the latest that have ended. Event loop only."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._num_begun = 0
        self._is_closed = False
        self._tasks: dict[ClusterChange, asyncio.Task[None]] = {}
        """Changes that have not ended, in order."""
        self._ended: deque[ClusterChange] = deque(maxlen=_NUM_KEPT)

    def __getitem__(self, number: int) -> ClusterChange:
        """Return the change of that id. Raises InvalidRequest."""
        for change in self.newest_first():
            if change.id == number:
                return change
        raise InvalidRequest(f"there is no change {number}; `kvrelay changes` lists them", field="id")

    def newest_first(self) -> list[ClusterChange]:
        """Return all that are known."""
        return sorted([*self._tasks, *self._ended], key=lambda change: change.id, reverse=True)

    def touching(self, pools: Collection[ProcessRole]) -> tuple[ClusterChange, ...]:
        """Return the changes of these pools that have not ended, in order."""
        return tuple(change for change in self._tasks if not change.pools.isdisjoint(pools))

    def begin(
        self,
        kind: ChangeKind,
        description: str,
        pools: Collection[ProcessRole],
        work: Callable[[Callable[[str], None]], Awaitable[None]],
    ) -> ClusterChange:
        """Run `work` once no earlier change touches these pools; it is called with a function that notes steps.

        Raises Cancelled when the cluster is being stopped.
        """
        if self._is_closed:
            raise Cancelled("cannot begin a change: the cluster is being stopped")
        self._num_begun += 1
        change = ClusterChange(self._num_begun, kind, description, pools)
        change.begun_s, change.begun_unix_s = self._clock.monotonic(), time.time()
        change.waits_for = self.touching(pools)
        logger.info("change begins", extra={"change": change.id, "kind": kind, "description": description})
        task = asyncio.create_task(self._run(change, work), name=str(change))
        self._tasks[change] = task
        task.add_done_callback(partial(self._note_end, change))
        return change

    def cancel(self, change: ClusterChange) -> None:
        """Begin to cancel a change; returns at once. Raises InvalidRequest if it has ended."""
        if change.state.is_end:
            raise InvalidRequest(f"{change} has ended: {change.state}", field="id")
        if change.state is not ChangeState.CANCELLING:  # a second cancellation must not disturb the way back
            change.advance(ChangeState.CANCELLING)
            self._tasks[change].cancel()

    def took_s(self, change: ClusterChange) -> float:
        """Return the age of a change, or how long it took."""
        return (self._clock.monotonic() if change.ended_s is None else change.ended_s) - change.begun_s

    async def close(self) -> None:
        """Cancel every change and wait for their ends, for a limited time; no other one begins."""
        self._is_closed = True
        for change in list(self._tasks):
            logger.info("%s is cancelled: the cluster is being stopped", change)
            self.cancel(change)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_CLOSE_S)
        for change in self._tasks:
            logger.error("%s has not ended %g s after it was cancelled", change, _CLOSE_S)

    async def _run(self, change: ClusterChange, work: Callable[[Callable[[str], None]], Awaitable[None]]) -> None:
        earlier = [self._tasks[each] for each in change.waits_for]
        if earlier:
            change.report(f"waits for {', '.join(map(str, change.waits_for))}")
            await asyncio.wait(earlier)
        change.advance(ChangeState.RUNNING)
        await work(change.report)

    def _note_end(self, change: ClusterChange, task: "asyncio.Task[None]") -> None:
        # Here and not in `_run`, which does not even begin if it is cancelled at once.
        del self._tasks[change]
        self._ended.append(change)
        change.ended_s = self._clock.monotonic()
        failure = None if task.cancelled() else task.exception()
        if task.cancelled():
            end = ChangeState.CANCELLED
        elif failure is None:
            end = ChangeState.DONE
        else:
            end = ChangeState.FAILED
            change.error = failure if isinstance(failure, Exception) else RuntimeError(repr(failure))
            logger.warning("change failed: %s", failure, extra={"change": change.id})
        if end is ChangeState.CANCELLED and change.state is not ChangeState.CANCELLING:
            change.advance(ChangeState.CANCELLING)  # its task was cancelled with the whole process
        change.advance(end)
