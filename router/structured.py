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
        self._tasks.update(tasks)
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._tasks.difference_update(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # seen: the owner raised the one that matters


async def all_or_first_failure(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait until all tasks have ended; raise the failure of one as soon as there is one."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done():
            task.result()
