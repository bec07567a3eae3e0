"""Self-measurement of generator processes, and whether the load generator itself distorted the figures of a run."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import numpy as np

from common.clock import Clock
from measure.load.records import GeneratorReport, RequestRecord
from measure.load.sending import until
from measure.load.wire import Pulse
from measure.pages.wording import duration

BEAT_S = 0.02
"""Time between two measurements of delay."""
LATE_S = 0.005
"""A request sent later than this is late. Delays matter above this or `LATE_SHARE`, whichever is larger."""
LATE_SHARE = 0.05
"""Negligible error, as a share of the median TTFT."""
STALL_FACTOR = 10.0
"""A single delay of this many times the limit is reported, whatever the percentiles are."""
BUSY_SHARE = 0.6
"""Share of a core above which new sessions go to another process."""
FULL_SHARE = 0.8
"""Share of a core above which requests wait for the generator."""
FULL_MACHINE = 0.95
_WINDOW = 4
"""Pulses over which the CPU share of a process is averaged: two seconds."""


class SelfMeter:
    """Measures the CPU time of this process and the delay with which it notices events, by waking every `BEAT_S`.

    Each wake-up missed during a stall counts with the time it would have waited, so that a stall weighs by its length.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lags_s: list[float] = []
        self._at_s = time.monotonic()
        self._cpu_s = time.process_time()
        self._first_sleep_s = _slept_s()

    async def run(self) -> None:
        """Measure until cancelled."""
        due_s = self._clock.monotonic() + BEAT_S
        while True:
            await until(due_s, self._clock)
            lag_s = self._clock.monotonic() - due_s
            while lag_s >= 0:
                self._lags_s.append(lag_s)
                lag_s -= BEAT_S
                due_s += BEAT_S

    def take(self) -> Pulse:
        """Return the pulse for the time since the last call."""
        now_s, cpu_s = time.monotonic(), time.process_time()
        share = (cpu_s - self._cpu_s) / max(now_s - self._at_s, 1e-9)
        self._at_s, self._cpu_s = now_s, cpu_s
        lags_s, self._lags_s = self._lags_s, []
        return Pulse(cpu_share=share, loop_lags_s=lags_s, suspended_s=_slept_s() - self._first_sleep_s)


def _slept_s() -> float:
    """Return the time that the machine was suspended since boot; 0 where no clock counts it."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)  # on Linux it runs on during suspension, unlike monotonic
    return time.clock_gettime(boottime) - time.monotonic() if boottime is not None else 0.0


@dataclass(slots=True)
class Evidence:
    """Observations of the generator processes, collected during the run."""

    max_processes: int
    pulses: dict[int, list[Pulse]] = field(default_factory=dict)
    machine_shares: list[float] = field(default_factory=list)
    """Busy share of all cores, at evenly spaced times."""
    runs_first: bool = True
    """Whether the kernel runs every process as soon as it has work (real-time scheduling)."""


def is_busy(pulse: Pulse) -> bool:
    """Return whether the process has too much work for more sessions."""
    return pulse.cpu_share > BUSY_SHARE


def judge(requests: Sequence[RequestRecord], evidence: Evidence) -> GeneratorReport:
    """Return how well the generator kept up."""
    lags_s = [max(0.0, request.lag_s) for request in requests] or [0.0]
    pulses = [pulse for of_one in evidence.pulses.values() for pulse in of_one]
    loop_lags_s = [lag for pulse in pulses for lag in pulse.loop_lags_s] or [0.0]
    report = GeneratorReport(
        num_processes=len(evidence.pulses),
        lag_p50_s=float(np.percentile(lags_s, 50)),
        lag_p99_s=float(np.percentile(lags_s, 99)),
        lag_max_s=max(lags_s),
        loop_lag_p99_s=float(np.percentile(loop_lags_s, 99)),
        cpu_share=max((_peak_share(of_one) for of_one in evidence.pulses.values()), default=0.0),
        num_late=sum(lag > LATE_S for lag in lags_s),
        warnings=(),
    )
    ttfts_s = [request.ttft_s for request in requests if request.ttft_s is not None]
    limit_s = max(LATE_S, LATE_SHARE * median(ttfts_s)) if ttfts_s else LATE_S
    return replace(report, warnings=tuple(_warnings(report, evidence, limit_s, max(loop_lags_s))))


def _warnings(report: GeneratorReport, evidence: Evidence, limit_s: float, loop_lag_max_s: float) -> Iterator[str]:
    blame = _blame(report, evidence)
    if report.lag_p99_s > limit_s:
        yield (
            f"{report.num_late} requests were sent more than {duration(LATE_S)} late (p99 {duration(report.lag_p99_s)},"
            f" at most {duration(report.lag_max_s)}): the server saw another load than the workload's.{blame}"
        )
    elif report.lag_max_s > STALL_FACTOR * limit_s:
        yield f"a request was sent {duration(report.lag_max_s)} late: the generator stalled once.{blame}"
    if report.loop_lag_p99_s > limit_s:
        yield (
            f"the generator noticed answers up to {duration(report.loop_lag_p99_s)} late (p99): "
            f"TTFT and gaps between tokens are wrong by as much.{blame}"
        )
    elif loop_lag_max_s > STALL_FACTOR * limit_s:
        yield f"the generator stalled for {duration(loop_lag_max_s)}: latencies of that time are too long.{blame}"
    if report.cpu_share > FULL_SHARE:
        advice = (
            f"all {evidence.max_processes} processes that it may use are busy; allow more, or use another machine"
            if report.num_processes >= evidence.max_processes
            else "it may use more processes but started them too late for this load; set their number"
        )
        yield f"a generator process used {report.cpu_share:.0%} of a core: {advice}"
    suspended_s = max((pulse.suspended_s for of_one in evidence.pulses.values() for pulse in of_one), default=0.0)
    if suspended_s > LATE_S:
        yield f"the machine was suspended for {suspended_s:.1f} s during the run: its figures are invalid"


def _blame(report: GeneratorReport, evidence: Evidence) -> str:
    """Return the cause of the generator's delay, where it is known."""
    if not evidence.machine_shares or fmean(evidence.machine_shares) < FULL_MACHINE:
        return ""
    if report.cpu_share > FULL_SHARE:
        return " All cores were busy, in good part with the generator itself."
    advice = "" if evidence.runs_first else ", or allow the generator real-time scheduling (CAP_SYS_NICE)"
    return (
        " All cores were busy, mostly not with the generator: a server on the same machine starves it."
        f" Give each its own cores{advice}."
    )


def _peak_share(pulses: Sequence[Pulse]) -> float:
    """Return the largest mean CPU share over a few consecutive pulses."""
    shares = np.array([pulse.cpu_share for pulse in pulses])
    width = min(_WINDOW, shares.size)
    return float(np.convolve(shares, np.full(width, 1 / width), "valid").max()) if width else 0.0
