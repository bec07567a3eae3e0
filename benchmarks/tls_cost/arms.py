"""The two arms, and the turns that they take."""

from collections.abc import Iterator, Mapping

import psutil

from benchmarks.trust import ENCRYPTED, PLAIN
from common.trust.authority import AuthoritySettings

OFF, ON = "off", "on"
SETTINGS: Mapping[str, AuthoritySettings] = {OFF: PLAIN, ON: ENCRYPTED}


def turns(num_rounds: int) -> Iterator[tuple[int, str]]:
    """Return round and arm, in order; round 0 is the warm-up."""
    for number in range(num_rounds + 1):
        for arm in (OFF, ON) if number % 2 else (ON, OFF):
            yield number, arm


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
