"""How a generator process itself does: its CPU share, how late it wakes, whether the machine slept."""

import time
from dataclasses import dataclass, field

from common.clock import Clock
from measure.load.alarm import Alarm
from measure.load.wire import Pulse

BEAT_S = 0.02
"""Between two measurements of lateness."""


@dataclass(slots=True)
class LoopMeter:
    """Measures how late a process notices things: it wants to wake at evenly spaced times, as answers come at any.

    A stall swallows beats; each of them counts with what it would have waited, so that a stall weighs as long as it
    was.
    """

    alarm: Alarm
    clock: Clock
    _lags_s: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """Measure until cancelled."""
        due_s = self.clock.monotonic() + BEAT_S
        while True:
            await self.alarm.until(due_s)
            lag_s = self.clock.monotonic() - due_s
            while lag_s >= 0:
                self._lags_s.append(lag_s)
                lag_s -= BEAT_S
                due_s += BEAT_S

    def take(self) -> list[float]:
        """Return the lags since the last call."""
        taken, self._lags_s = self._lags_s, []
        return taken


class PulseTaker:
    """Makes a process's pulses."""

    def __init__(self, meter: LoopMeter) -> None:
        self._meter = meter
        self._at_s = time.monotonic()
        self._cpu_s = time.process_time()
        self._first_sleep_s = _slept_s()

    def take(self) -> Pulse:
        """Return how the process did since the last call."""
        now_s, cpu_s = time.monotonic(), time.process_time()
        share = (cpu_s - self._cpu_s) / max(now_s - self._at_s, 1e-9)
        self._at_s, self._cpu_s = now_s, cpu_s
        return Pulse(cpu_share=share, loop_lags_s=self._meter.take(), suspended_s=_slept_s() - self._first_sleep_s)


def _slept_s() -> float:
    """Return how long the machine has been suspended since it was booted; 0 where no clock tells."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)  # Linux: goes on while the machine sleeps, unlike monotonic
    return time.clock_gettime(boottime) - time.monotonic() if boottime is not None else 0.0
