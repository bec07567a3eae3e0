"""Whether a run's numbers are the server's, or the generator's own."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import numpy as np

from measure.load.records import GeneratorReport, RequestRecord
from measure.load.wire import Pulse

LATE_S = 0.005
"""A request that is sent later than this is late. What matters is judged by this or by `LATE_SHARE`, the larger one."""
LATE_SHARE = 0.05
"""Of the median TTFT: an error that nobody would see."""
STALL_FACTOR = 10.0
"""A single lag so many times what matters is worth a word, whatever the percentiles say."""
BUSY_SHARE = 0.6
"""Of a core: more, and new sessions are better sent by another process."""
FULL_SHARE = 0.8
"""Of a core: more, and requests wait for the generator."""
FULL_MACHINE = 0.95
_WINDOW = 4
"""Pulses over which a process's CPU share is averaged: two seconds."""


@dataclass(slots=True)
class Evidence:
    """What the load test has seen of its processes. Filled while the run goes on."""

    max_processes: int
    pulses: dict[int, list[Pulse]] = field(default_factory=dict)
    """By process."""
    machine_shares: list[float] = field(default_factory=list)
    """Of all cores, at evenly spaced times."""
    runs_first: bool = True
    """Whether the kernel lets every process run as soon as it has something to do."""


def is_busy(pulse: Pulse) -> bool:
    """Whether a process should get company."""
    return pulse.cpu_share > BUSY_SHARE


def judge(requests: Sequence[RequestRecord], evidence: Evidence) -> GeneratorReport:
    """Return how the generator did."""
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
    return _with_warnings(
        report, evidence, limit_s, max(loop_lags_s), max((p.suspended_s for p in pulses), default=0.0)
    )


def _with_warnings(
    report: GeneratorReport, evidence: Evidence, limit_s: float, loop_lag_max_s: float, suspended_s: float
) -> GeneratorReport:
    warnings = []
    blame = _blame(report, evidence)
    if report.lag_p99_s > limit_s:
        warnings.append(
            f"{report.num_late} requests were sent more than {_ms(LATE_S)} late (p99 {_ms(report.lag_p99_s)}, "
            f"at most {_ms(report.lag_max_s)}): the server saw another load than the one asked for.{blame}"
        )
    elif report.lag_max_s > STALL_FACTOR * limit_s:
        warnings.append(f"a request was sent {_ms(report.lag_max_s)} late: the generator stalled once.{blame}")
    if report.loop_lag_p99_s > limit_s:
        warnings.append(
            f"the generator noticed answers up to {_ms(report.loop_lag_p99_s)} late (p99): "
            f"TTFT and gaps between tokens are wrong by as much.{blame}"
        )
    elif loop_lag_max_s > STALL_FACTOR * limit_s:
        warnings.append(
            f"for {_ms(loop_lag_max_s)} the generator noticed nothing: latencies of that time are too long.{blame}"
        )
    if report.cpu_share > FULL_SHARE:
        advice = (
            f"all {evidence.max_processes} processes that it may use are at work; give it more, or another machine"
            if report.num_processes >= evidence.max_processes
            else "it may use more processes, and started them too late for this load: give their number"
        )
        warnings.append(f"a generator process used {report.cpu_share:.0%} of a core: {advice}")
    if suspended_s > LATE_S:
        warnings.append(
            f"the machine was suspended for {suspended_s:.1f} s during the run: nothing of it can be trusted"
        )
    return replace(report, warnings=tuple(warnings))


def _blame(report: GeneratorReport, evidence: Evidence) -> str:
    """Say what a late generator had to wait for, where that is known."""
    if not evidence.machine_shares or fmean(evidence.machine_shares) < FULL_MACHINE:
        return ""
    if report.cpu_share > FULL_SHARE:
        return " The machine's cores were all busy, and the generator itself took a good part of them."
    advice = "" if evidence.runs_first else ", or the generator the right to real-time scheduling (CAP_SYS_NICE)"
    return (
        " The machine's cores were all busy, the generator's share of them small: on a machine that it has in common "
        f"with the server, the server starves it. Give each its own cores{advice}."
    )


def _peak_share(pulses: Sequence[Pulse]) -> float:
    """Return the largest mean CPU share over a few consecutive pulses."""
    shares = np.array([pulse.cpu_share for pulse in pulses])
    width = min(_WINDOW, shares.size)
    return float(np.convolve(shares, np.full(width, 1 / width), "valid").max()) if width else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
