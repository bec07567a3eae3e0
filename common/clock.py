"""Monotonic time as a dependency, so that tests and the simulator control it."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic time."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary origin; never goes back."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()


def turn_time_s() -> float:
    """Return a time that measures turns of the running loop: real, so that long turns are seen.

    A loop of virtual time, which `is_virtual`, has turns without a length: what a simulation does then follows from its
    input alone, however busy the host is.
    """
    loop = asyncio.get_running_loop()
    return loop.time() if getattr(loop, "is_virtual", False) else time.perf_counter()
