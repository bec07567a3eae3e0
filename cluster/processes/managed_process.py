"""Keeps one process running.

1. Start it and wait until it serves. A first start that fails is fatal: the configuration is wrong, and retrying
   would only hide the message.
2. Notify the supervisor, wait for the process to die, notify the supervisor again.
3. Start it again, without end: at once if it had served for a while, else after a growing delay.

`life` has the states and their tables.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from cluster.processes.diff import Generation
from cluster.processes.launcher import Launcher, RunningProcess, StartFailed
from cluster.processes.life import Life, ProcessPhase
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.state import ProcessState
from cluster.processes.worker_calls import set_role
from common.clock import Clock
from common.errors import KvrelayError, WorkerLost
from common.rpc import Connect

logger = logging.getLogger(__name__)

_NEW_GRACE_S = 5.0
"""Time for a new worker, which no router knows, to be empty."""


class ManagedProcess:
    """One process of the cluster. Event loop only."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        launcher: Launcher,
        connect: Connect,
        clock: Clock,
        changed: Callable[["ManagedProcess"], None],
        generation: Generation = (),
    ) -> None:
        """`connect` makes channels to workers; `changed` is called after every change of phase or role."""
        self.spec = spec
        self.generation = generation
        """Equal for processes that can exchange KV."""
        self.life = Life()
        self.served = asyncio.Event()
        """Set when it serves for the first time."""
        self._connect = connect
        self._launcher = launcher
        self._clock = clock
        self._changed = changed
        self._running: RunningProcess | None = None
        self._keeping: asyncio.Task[NoReturn] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._ended_for = ""
        """Why its present life was ended; empty if it was not."""

    @property
    def name(self) -> str:
        """The name of its spec."""
        return self.spec.name

    @property
    def address(self) -> str | None:
        """host:port while it serves."""
        return self._running.ready.address if self._running is not None else None

    @property
    def admin_address(self) -> str | None:
        """host:port for calls of the controller, while it serves."""
        return self._running.ready.admin_address if self._running is not None else None

    @property
    def missing_room(self) -> str:
        """The room that it waits for, beside what is free; empty if it has room."""
        return self._launcher.missing_room_of(self.spec)

    def state(self) -> ProcessState:
        """Return its entry of state.json."""
        running = self._running
        return ProcessState(
            name=self.name,
            role=self.spec.role,
            phase=self.life.phase,
            identity=running.identity if running is not None else None,
            address=self.address or "",
            metrics_port=running.ready.metrics_port if running is not None else 0,
            num_restarts=max(0, self.life.num_lives - 1),
            last_exit=self.life.last_exit,
        )

    async def change_role(self, role: ProcessRole, *, grace_s: float) -> None:
        """Move a serving worker to the other pool, also for later restarts.

        Raises KvrelayError; then it has its old role, and if it does not confirm that, it is stopped and started again.
        """
        running = self._running
        if running is None:
            raise WorkerLost(f"cannot call {self.name}: it is being started or stopped; repeat")
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

    def keep(self, create_task: Callable[..., "asyncio.Task[NoReturn]"]) -> "asyncio.Task[NoReturn]":
        """Keep it running in a task of its own, which raises StartFailed if the first start fails."""
        self._keeping = create_task(self.keep_running(), name=f"keep {self.name}")
        return self._keeping

    def end_life(self, reason: str, *, grace_s: float) -> None:
        """Have the running process stopped, and its successor started; returns at once."""
        running = self._running
        if running is not None and (self._ending is None or self._ending.done()):
            self._ended_for = reason
            self._ending = asyncio.create_task(running.stop(grace_s), name=f"end {self.name}")

    async def let_die(self) -> None:
        """Do not start it any more. A running process is left to `stop`."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait((self._keeping,))

    async def keep_running(self) -> NoReturn:
        """Run it until cancelled; a running process is then left to `stop`. Raises StartFailed from the first start."""
        while True:
            born_s = self._clock.monotonic()
            reason = await self._live_once()
            reason, self._ended_for = self._ended_for or reason, ""
            delay_s = self.life.die(reason, lived_s=self._clock.monotonic() - born_s)
            logger.warning("process died", extra={"service": self.name, "reason": reason, "restart_delay_s": delay_s})
            self._set(ProcessPhase.WAITING, None)
            await asyncio.sleep(delay_s)

    async def stop(self, grace_s: float) -> None:
        """Let it drain, then kill it, for good."""
        await self.let_die()
        if self._running is not None:
            await self._running.stop(grace_s)
        self._set(ProcessPhase.STOPPED, None)

    async def _live_once(self) -> str:
        self._set(ProcessPhase.STARTING, None)
        try:
            running = await self._launcher.start(self.spec)
        except StartFailed as error:
            if not self.life.has_served:
                raise
            return str(error)
        try:
            refusal = await self._ensure_role(running)
        except BaseException:  # nothing else knows of it yet
            await running.stop(0)
            raise
        if refusal is not None:
            return refusal
        self.served.set()
        self._set(ProcessPhase.READY, running)
        logger.info("process ready", extra={"service": self.name, "address": self.address, "pid": running.ready.pid})
        return await running.exited()

    async def _ensure_role(self, running: RunningProcess) -> str | None:
        """Give a restarted worker, which may begin in an earlier role, its own; returns why it had to be stopped.

        A worker that an earlier supervisor left keeps the role that it has.
        """
        if running.ready.role in ("", self.spec.role):
            return None
        if self.life.is_adopted and self.life.num_lives == 0:
            self.spec = replace(self.spec, role=ProcessRole(running.ready.role))
            return None
        try:
            await set_role(running.ready.address, self.spec.role, self._connect, grace_s=_NEW_GRACE_S)
        except KvrelayError as error:
            await running.stop(0)
            return f"it does not become a {self.spec.role} worker: {error}"
        return None

    def _set(self, phase: ProcessPhase, running: RunningProcess | None) -> None:
        self.life.enter(phase)
        self._running = running
        self._changed(self)
