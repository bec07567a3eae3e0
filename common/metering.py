"""Charges the time that a task takes of the event loop to a payer.

A door names the payer when it knows the tenant; the task, and those that it starts, are charged from then on. What runs
for all requests together, such as the streams from workers, has no payer.
"""

from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from common.clock import turn_time_s

T = TypeVar("T")


class Payer(Protocol):
    """Takes charges."""

    def pay(self, seconds: float) -> None:
        """Count time on the event loop, or on a thread that reads requests."""
        ...


_payer: ContextVar[Payer | None] = ContextVar("payer", default=None)


def charge_to(payer: Payer) -> None:
    """Charge the running task to `payer`, and every task that it starts from now on."""
    _payer.set(payer)


def is_charged() -> bool:
    """Return whether the running task has a payer."""
    return _payer.get() is not None


def charge(seconds: float) -> None:
    """Charge time to the payer of the running task, if it has one."""
    if (payer := _payer.get()) is not None:
        payer.pay(seconds)


class Metered(Coroutine[Any, Any, T]):
    """A coroutine whose steps are charged to the payer of its task, each when it has ended."""

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        """Take a step."""
        begun_s = turn_time_s()
        try:
            return self._coroutine.send(value)
        finally:
            if (payer := _payer.get()) is not None:
                payer.pay(turn_time_s() - begun_s)

    def throw(self, *error: Any) -> Any:
        """Take a step that begins with an exception."""
        begun_s = turn_time_s()
        try:
            return self._coroutine.throw(*error)
        finally:
            charge(turn_time_s() - begun_s)
            del error  # else it refers to itself by its traceback, and to all that its frames hold

    def close(self) -> None:
        """End the coroutine."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        """Take all steps within another coroutine."""
        return self  # an iterator with `send` and `throw` is all that `await` needs

    def __iter__(self) -> "Metered[T]":
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Take a step."""
        return self.send(None)
