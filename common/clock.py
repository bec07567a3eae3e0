"""Monotonic time as a dependency, so that tests and the simulator control it."""

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
