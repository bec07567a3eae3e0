"""Faults of messages on their way."""

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Fate(enum.Enum):
    """Fate of a message."""

    ARRIVE = "arrive"
    LOSE = "lose"
    """It vanishes; if it is a call's first or last message, the connection breaks."""
    REPEAT = "repeat"
    """It arrives twice."""


class FaultInjector(Protocol):
    """Decides the fate of every message, in the order of sending."""

    def fate(self, source: str, target: str) -> tuple[Fate, float]:
        """Return the fate of a message between two hosts, and its delay in seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Probabilities per message."""

    lose: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    max_delay_s: float = 0.0
    """Upper bound of the uniform delay of a late message."""
    stall: float = 0.0
    """Probability that the sending host stalls: all its messages wait."""
    stall_s: float = 0.0


class SeededFaults:
    """Faults drawn from a seed."""

    def __init__(self, rates: FaultRates, *, seed: int, now_s: Callable[[], float]) -> None:
        self._rates = rates
        self._random = random.Random(seed)
        self._now_s = now_s
        self._silent_until_s: dict[str, float] = {}
        self.is_quiet = False
        """Whether faults are switched off."""
        self.num_lost = 0
        self.num_repeated = 0
        self.num_late = 0
        self.num_stalls = 0

    def fate(self, source: str, target: str) -> tuple[Fate, float]:
        """See `FaultInjector`."""
        rates, draw, now_s = self._rates, self._random.random, self._now_s()
        if self.is_quiet:
            return Fate.ARRIVE, 0.0
        late_s = 0.0
        if draw() < rates.stall:
            self.num_stalls += 1
            self._silent_until_s[source] = now_s + rates.stall_s
        if draw() < rates.delay:
            self.num_late += 1
            late_s = draw() * rates.max_delay_s
        late_s = max(late_s, self._silent_until_s.get(source, 0.0) - now_s)
        which = draw()
        if which < rates.lose:
            self.num_lost += 1
            return Fate.LOSE, late_s
        if which < rates.lose + rates.repeat:
            self.num_repeated += 1
            return Fate.REPEAT, late_s
        return Fate.ARRIVE, late_s
