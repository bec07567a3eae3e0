"""Children of this process: pipes to their standard streams, waiting, and reaping. Event loop only."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import psutil

from cluster.processes.liveness import until_exited
from common.process import ProcessIdentity

_POLL_S = 0.005
LOOK_S = 5.0
"""Time between looks for dead children that nothing waits for; one that is dead at two looks in a row is reaped."""

Begin = Callable[[int, int], Awaitable[int]]
"""Starts a process with these descriptors as its stdin and stdout; returns its pid. The caller closes them."""


class Child:
    """A child of this process, which nothing else reaps."""

    def __init__(self, pid: int, owned: "dict[int, Child]") -> None:
        """`owned` has it by its pid until it is reaped."""
        self.pid = pid
        self.identity = ProcessIdentity.of(pid)
        self._owned = owned
        self._code: int | None = None
        owned[pid] = self

    async def exit_code(self) -> int:
        """Return its exit status once it is over, negative for a signal; several tasks may wait."""
        if self._code is None:
            await _until_gone(self.pid)
        while (code := self.reap()) is None:  # noqa: ASYNC110 - the kernel may need a while to end its last thread
            await asyncio.sleep(_POLL_S)
        return code

    def reap(self) -> int | None:
        """Return its exit status; None while it is not over."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                del self._owned[pid]
        return self._code

    async def exit_code_within(self, grace_s: float) -> int:
        """Return its exit status; kills it after a while."""
        try:
            async with asyncio.timeout(grace_s):
                return await self.exit_code()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """Kill it, and return its exit status."""
        self.signal(signal.SIGKILL)
        return await self.exit_code()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal if it is not over."""
        if self._code is None:  # not reaped: the pid is still its own
            os.kill(self.pid, number)


class PipedChild(Child):
    """A child with pipes to its stdin and from its stdout."""

    def __init__(
        self, pid: int, owned: dict[int, Child], stdin: asyncio.WriteTransport, stdout: asyncio.StreamReader
    ) -> None:
        super().__init__(pid, owned)
        self.stdin, self.stdout = stdin, stdout


class Children:
    """Starts children, and reaps what they leave where this process is the subreaper of their descendants."""

    def __init__(self) -> None:
        self._owned: dict[int, Child] = {}

    def add(self, pid: int) -> Child:
        """Return a process that was started as a child."""
        return Child(pid, self._owned)

    async def start(self, begin: Begin) -> PipedChild:
        """Return a process that `begin` starts, with pipes. Raises what that raises."""
        loop, stdout = asyncio.get_running_loop(), asyncio.StreamReader()
        with ExitStack() as given, ExitStack() as own:
            its_stdin, writing = os.pipe()
            given.callback(os.close, its_stdin)
            to_it, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(writing, "wb", 0))
            own.callback(to_it.close)
            reading, its_stdout = os.pipe()
            given.callback(os.close, its_stdout)
            from_it, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(reading, "rb", 0)
            )
            own.callback(from_it.close)
            pid = await begin(its_stdin, its_stdout)
            own.pop_all()
            return PipedChild(pid, self._owned, to_it, stdout)

    async def reap_strays(self) -> None:
        """Reap dead children that nothing waits for, until cancelled: those of services that have ended, and others."""
        dead: set[int] = set()
        while True:
            await asyncio.sleep(LOOK_S)
            found = set(_dead_children())
            for pid in found & dead:
                self._reap(pid)
            dead = found - dead

    def _reap(self, pid: int) -> None:
        child = self._owned.get(pid)
        with suppress(ChildProcessError):
            if child is None:
                os.waitpid(pid, os.WNOHANG)
            else:
                child.reap()


def _dead_children() -> list[int]:
    found = []
    with suppress(psutil.Error, OSError):
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE:
                    found.append(child.pid)
    return found


async def _until_gone(pid: int) -> None:
    """Return when a child has exited, or at once without pidfds; it is not reaped, so the pid is its own."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # an old kernel, a sandbox, or no descriptor is left
        return
    try:
        await until_exited(fd)
    finally:
        os.close(fd)
