"""Signal handling, so that commands stop what they started however they end."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGTERM and Ctrl-C after the block. Main thread only."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does. Main thread only."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with handlers_kept():
        signal.signal(signal.SIGTERM, interrupt)
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM, so that a second one does not interrupt a clean-up. Main thread only."""
    with handlers_kept():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        yield


def set_on_signals(stopping: asyncio.Event) -> None:
    """Have SIGTERM and Ctrl-C set an event. Call on the event loop of the main thread."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)


def on_first_signal(stop: Callable[[], None]) -> None:
    """Call `stop` with the first SIGTERM or Ctrl-C; a second one ends the process at once. As `set_on_signals`."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, first)
