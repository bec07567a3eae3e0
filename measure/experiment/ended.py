"""The number of simulated requests that have ended, over all processes of an experiment."""

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

_counter: "Synchronized[int] | None" = None


def start_counting() -> "Synchronized[int]":
    """Return the counter of the requests that end from now on, for a look from another thread."""
    counter = multiprocessing.get_context("spawn").Value("Q", 0)
    _count_in(counter)
    return counter


def counting_here() -> Callable[[], None]:
    """Return what a child process calls so that its requests count in this process's counter, if it has one."""
    return partial(_count_in, _counter)


def count_request(_num_of_cell: int) -> None:
    """Count one more request."""
    if _counter is not None:
        with _counter.get_lock():
            _counter.value += 1


def _count_in(counter: "Synchronized[int] | None") -> None:
    global _counter
    _counter = counter
