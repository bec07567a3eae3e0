"""Tasks that never outlive their owner.

Not asyncio.TaskGroup: on Python 3.11 a group whose child fails while its owner waits leaves the owner marked as
cancelled, which breaks every `asyncio.timeout` around it, and a failure in the moment of a cancellation hides
the cancellation. Here the owner waits by itself, so an own cancellation and a child's failure stay what they are.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any


class TaskCensus:
    """Starts owned tasks and counts those that run. Event loop only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_tasks(self) -> int:
        """Tasks that run."""
        return len(self._tasks)

    @asynccontextmanager
    async def owned(self, *works: Coroutine[Any, Any, None]) -> AsyncIterator[tuple["asyncio.Task[None]", ...]]:
        """Run `works` beside the block. Leaving it cancels those that still run and waits until they have ended."""
        tasks = tuple(asyncio.create_task(work) for work in works)
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(self._forget)
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await until_ended(tasks)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: the owner raises the one that matters


async def all_or_first_failure(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait until all tasks have ended; raise the failure of one as soon as there is one."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done():
            task.result()


async def until_ended(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Wait for cancelled tasks even when the owner is cancelled again meanwhile, as a deadline and a client may do."""
    interruption: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is not None:
        raise interruption
