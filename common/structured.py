"""Tasks that never outlive their owner.

Not asyncio.TaskGroup: on Python 3.11 a group whose child fails while its owner waits leaves the owner marked as
cancelled, which breaks every `asyncio.timeout` around it, and a failure during a cancellation hides the cancellation.
Here the owner waits itself, so that its own cancellation and a child's failure stay distinct.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

from common.clock import turn_time_s
from common.metering import Metered, is_charged

logger = logging.getLogger(__name__)

T = TypeVar("T")
TURN_S = 0.005
"""Longest time that work without a pause should take on an event loop."""
_MANY = 8
"""Most tasks that are cancelled in one turn."""
_PAUSE_S = 0.5
"""Pause before work that has failed begins again."""


class TaskTracker:
    """Starts owned tasks and counts the running ones. Event loop only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_tasks(self) -> int:
        """Running tasks."""
        return len(self._tasks)

    @asynccontextmanager
    async def owned(self, *works: Coroutine[Any, Any, None]) -> AsyncIterator[tuple["asyncio.Task[None]", ...]]:
        """Run `works` concurrently with the block. Leaving it cancels running ones and waits until they have ended.

        They are charged to the payer of the running task.
        """
        tasks = tuple(asyncio.create_task(Metered(work) if is_charged() else work) for work in works)
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(self._forget)
        try:
            yield tasks
        finally:
            await end_all(tasks)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: the owner raises the relevant one


async def all_or_first_failure(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait until all tasks have ended; raise the first failure at once."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done():
            task.result()


async def end_all(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until they have ended, even if the owner is cancelled again.

    Each has something to undo, so of many few are cancelled in one turn of the loop, fewer while its turns are long.
    """
    interruption: asyncio.CancelledError | None = None
    rest, num_at_once = list(tasks), _MANY
    while True:
        now, rest = rest[:num_at_once], rest[num_at_once:]
        for task in now:
            task.cancel()
        if not (pending := [task for task in tasks if not task.done()]):
            break
        begun_s = turn_time_s()
        try:
            await (one_turn() if rest else asyncio.wait(pending))
        except asyncio.CancelledError as error:
            interruption = error
        is_long = turn_time_s() - begun_s > TURN_S
        num_at_once = max(1, num_at_once // 2) if is_long else min(2 * num_at_once, _MANY)
    if interruption is not None:
        raise interruption


async def one_turn() -> None:
    """Let every other task that is ready take a step."""
    await asyncio.sleep(0)


async def for_each(
    items: Iterable[T], use: Callable[[T], object], pause: Callable[[], Awaitable[None]] = one_turn
) -> None:
    """Call `use` with each item, with a pause for other tasks whenever making and using them has taken TURN_S."""
    begun_s = turn_time_s()
    for item in items:
        use(item)
        if turn_time_s() - begun_s > TURN_S:
            await pause()
            begun_s = turn_time_s()


def do_nothing(_item: object) -> None:
    """Use an item whose making was all that there is to do."""


async def completed(step: Coroutine[Any, Any, T]) -> T:
    """Take a step to its end and return its result, even if the caller is cancelled meanwhile.

    The cancellation is raised when the step has succeeded.
    """
    task = asyncio.ensure_future(step)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            interruption = error
    result = task.result()
    if interruption is not None:
        raise interruption
    return result


async def keep_going(what: str, work: Callable[[], Awaitable[object]]) -> NoReturn:
    """Run endless work until cancelled. Work that fails is logged and begins again: nothing else notices its end."""
    while True:
        try:
            await work()
        except Exception:  # the top of a task
            logger.exception("%s failed, and begins again", what)
        await asyncio.sleep(_PAUSE_S)
