"""Task groups, with the errors that their owners want to see."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, NoReturn


class TaskCensus:
    """Starts tasks in task groups and counts those that have not ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_tasks(self) -> int:
        """Tasks that run."""
        return len(self._tasks)

    def spawn(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task that belongs to `group`."""
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def reraise_first(errors: BaseExceptionGroup[Any]) -> NoReturn:
    """Raise the first error of a task group by itself, or CancelledError when the owner was cancelled meanwhile.

    A group that fails in the moment in which its owner is cancelled reports only the failure; going on from there
    would swallow the cancellation.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from errors
    raise next(_leaves(errors)) from None


def _leaves(errors: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
