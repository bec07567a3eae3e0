"""Dependencies of a worker that a simulation replaces: clock, peers, the driver of its engine, the host's cores."""

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from common.cgroups import usable_cores
from common.clock import Clock, SystemClock
from common.rpc import Connect
from common.trust.channels import connect_to
from common.trust.credentials import Credentials
from common.trust.identity import Role
from engine.thread import DriverFactory, EngineThread
from kv_tiers.tiers import Tiers
from kv_transfer.serve import CheckPull, check_by

_WINDOW_S = 60.0
_GAP_S = 10.0


class _Reading(NamedTuple):
    read_s: float
    idle_s: float
    """Idle time of all cores since the host started."""
    used_s: float
    """Time of this process on cores."""


class HostCores:
    """Cores of its host that a worker has found idle lately, and that another worker beside it could use.

    Reads the host's idle time now and then. Event loop only.
    """

    def __init__(self) -> None:
        self._readings = deque([_read()])
        self._num_usable = usable_cores()

    def note(self) -> None:
        """Take a reading when the last one is some seconds old: cheap enough for every step."""
        if time.monotonic() - self._readings[-1].read_s >= _GAP_S:
            with suppress(OSError):  # no descriptor is free: the next step reads
                self._readings.append(_read())
            while len(self._readings) > 1 and self._readings[-1].read_s - self._readings[1].read_s >= _WINDOW_S:
                self._readings.popleft()

    @property
    def num_idle(self) -> float:
        """Cores that were idle in the last minute or a little more, in the mean; a container's limit leaves fewer."""
        self.note()
        first, now = self._readings[0], _read()
        passed_s = max(now.read_s - first.read_s, 1e-3)
        left = self._num_usable - (now.used_s - first.used_s) / passed_s
        return max(0.0, min(left, (now.idle_s - first.idle_s) / passed_s))


def _read() -> _Reading:
    times = psutil.cpu_times()
    return _Reading(time.monotonic(), times.idle + getattr(times, "iowait", 0.0), time.process_time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Dependencies of a worker that a simulation replaces."""

    clock: Clock
    connect: Connect
    """Channels to other workers."""
    drive: DriverFactory
    """Makes the engine and runs it."""
    check_pull: CheckPull
    """Checks another worker's right to a pull."""
    host_cores: HostCores | None = None
    """The host's idle cores; None where there is no real host."""
    tiers: Tiers | None = None
    """Cached blocks outside the pages; None: there are no tiers."""

    @classmethod
    def real(cls, credentials: Credentials) -> "Environment":
        """Return the dependencies of a real worker with these credentials."""
        return cls(
            clock=SystemClock(),
            connect=connect_to(Role.WORKER, credentials),
            drive=EngineThread.of,
            check_pull=check_by(credentials),
            host_cores=HostCores(),
        )
