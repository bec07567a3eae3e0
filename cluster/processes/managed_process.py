"""Keeps one process running.

1. Start it and wait until it serves. A first start that fails is fatal: the configuration is wrong, and retrying
   would only hide the message.
2. Tell the supervisor, wait for its death, tell again.
3. Start it again: at once when it had served for a while, else after a growing delay. For ever.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from cluster.changes.worker_role import set_role
from cluster.processes.launcher import Launcher, RunningProcess, StartFailed
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.state import ProcessPhase, ProcessState
from common.clock import Clock
from common.errors import KvrelayError, WorkerLost
from common.process import ProcessIdentity
from common.rpc import Connect

logger = logging.getLogger(__name__)

_LONG_LIFE_S = 10.0
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 5.0
_NEW_GRACE_S = 5.0
"""For a new worker, which nobody was told of, to be empty."""


def restart_delay_s(num_short_lives: int) -> float:
    """Return how long to hold back the next start after that many short lives in a row: 0, 0.25, 0.5, … 5 s."""
    return 0.0 if num_short_lives <= 1 else min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(num_short_lives - 2, 16))


class ManagedProcess:
    """One process of the plan. Event loop only."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        launcher: Launcher,
        connect: Connect,
        clock: Clock,
        changed: Callable[["ManagedProcess"], None],
    ) -> None:
        """`connect` makes channels to workers."""
        self.spec = spec
        self._connect = connect
        self._launcher = launcher
        self._clock = clock
        self._changed = changed
        self._phase = ProcessPhase.STARTING
        self._running: RunningProcess | None = None
        self._identity: ProcessIdentity | None = None
        self._num_lives = 0
        self._has_served = False
        self._num_short_lives = 0
        self._last_exit = ""
        self.served = asyncio.Event()
        """Set when it serves for the first time."""

    @property
    def address(self) -> str | None:
        """host:port while it serves."""
        return self._running.ready.address if self._running is not None else None

    @property
    def admin_address(self) -> str | None:
        """host:port where the controller calls it, while it serves."""
        return self._running.ready.admin_address if self._running is not None else None

    @property
    def num_lives(self) -> int:
        """How often it has come up."""
        return self._num_lives

    @property
    def pid(self) -> int | None:
        """Its pid, on its own host, while it serves."""
        return self._running.ready.pid if self._running is not None else None

    def adopt(self) -> None:
        """Take it for one that has served under an earlier supervisor: a start that fails is tried again."""
        self._has_served = True

    def state(self) -> ProcessState:
        """Return what state.json tells about it."""
        return ProcessState(
            name=self.spec.name,
            role=self.spec.role,
            phase=self._phase,
            identity=self._identity,
            address=self.address or "",
            metrics_port=self._running.ready.metrics_port if self._running is not None else 0,
            num_restarts=max(0, self._num_lives - 1),
            last_exit=self._last_exit,
        )

    async def change_role(self, role: ProcessRole, *, grace_s: float) -> None:
        """Have a serving worker, now and after restarts, in the other pool.

        Raises KvrelayError; it has its old role then, and is stopped, to be started anew, if it does not even say so.
        """
        running = self._running
        if running is None:
            raise WorkerLost(f"{self.spec.name} is away")
        try:
            await set_role(running.ready.address, role, self._connect, grace_s=grace_s)
        except KvrelayError:
            try:
                await set_role(running.ready.address, self.spec.role, self._connect, grace_s=0)
            except KvrelayError:
                await running.stop(0)
            raise
        self.spec = replace(self.spec, role=role)
        self._changed(self)

    async def keep_running(self) -> NoReturn:
        """Run until cancelled; a running process is then left to `stop`. Raises StartFailed from the first start."""
        while True:
            born_s = self._clock.monotonic()
            reason = await self._live_once()
            served_long = self._clock.monotonic() - born_s >= _LONG_LIFE_S
            self._num_short_lives = 0 if served_long else self._num_short_lives + 1
            delay_s = restart_delay_s(self._num_short_lives)
            logger.warning(
                "process died", extra={"service": self.spec.name, "reason": reason, "restart_delay_s": delay_s}
            )
            self._last_exit = reason.splitlines()[0]
            self._set(ProcessPhase.WAITING, None)
            await asyncio.sleep(delay_s)

    async def stop(self, grace_s: float) -> None:
        """Let it drain, then kill it. Call after `keep_running` has ended."""
        if self._running is not None:
            await self._running.stop(grace_s)
        self._set(ProcessPhase.STOPPED, None)

    async def _live_once(self) -> str:
        self._set(ProcessPhase.STARTING, None)
        try:
            running = await self._launcher.start(self.spec)
        except StartFailed as error:
            if not self._has_served:
                raise
            return str(error)
        try:
            why = await self._in_role(running)
        except BaseException:  # nobody else knows of it yet
            await running.stop(0)
            raise
        if why is not None:
            return why
        self._num_lives += 1
        self._has_served = True
        self.served.set()
        self._set(ProcessPhase.READY, running)
        logger.info("process ready", extra={"service": self.spec.name, "address": self.address, "pid": self.pid})
        return await running.exited()

    async def _in_role(self, running: RunningProcess) -> str | None:
        """Give a restarted worker, which may begin in an earlier role, its own; returns why it had to be stopped.

        One that an earlier supervisor has left keeps the role that it has.
        """
        if running.ready.role in ("", self.spec.role):
            return None
        if self._has_served and self._num_lives == 0:
            self.spec = replace(self.spec, role=ProcessRole(running.ready.role))
            return None
        try:
            await set_role(running.ready.address, self.spec.role, self._connect, grace_s=_NEW_GRACE_S)
        except KvrelayError as error:
            await running.stop(0)
            return f"it does not become a {self.spec.role} worker: {error}"
        return None

    def _set(self, phase: ProcessPhase, running: RunningProcess | None) -> None:
        self._phase = phase
        self._running = running
        self._identity = running.identity if running is not None else None
        self._changed(self)
