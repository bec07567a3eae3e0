"""Self-measurement of a generator process: CPU share, delay of wake-ups, suspension of the machine."""

import time
from dataclasses import dataclass, field

from common.clock import Clock
from measure.load.alarm import Alarm
from measure.load.wire import Pulse

BEAT_S = 0.02
"""Time between two measurements of delay."""


@dataclass(slots=True)
class LoopMeter:
    """Measures the delay with which a process notices events, by waking at evenly spaced times.

    Each wake-up missed during a stall counts with the time it would have waited, so that a stall weighs by its length.
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
        """Return the delays since the last call."""
        taken, self._lags_s = self._lags_s, []
        return taken


class PulseTaker:
    """Makes the pulses of this process."""

    def __init__(self, meter: LoopMeter) -> None:
        self._meter = meter
        self._at_s = time.monotonic()
        self._cpu_s = time.process_time()
        self._first_sleep_s = _slept_s()

    def take(self) -> Pulse:
        """Return the pulse for the time since the last call."""
        now_s, cpu_s = time.monotonic(), time.process_time()
        share = (cpu_s - self._cpu_s) / max(now_s - self._at_s, 1e-9)
        self._at_s, self._cpu_s = now_s, cpu_s
        return Pulse(cpu_share=share, loop_lags_s=self._meter.take(), suspended_s=_slept_s() - self._first_sleep_s)


def _slept_s() -> float:
    """Return the time that the machine was suspended since boot; 0 where no clock counts it."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)  # on Linux it runs on during suspension, unlike monotonic
    return time.clock_gettime(boottime) - time.monotonic() if boottime is not None else 0.0
