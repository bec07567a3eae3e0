"""A fork server: a process that has imported the modules of the services, and forks each service when it is asked to.

A service that is forked starts without its imports, which are most of its start, and shares their memory. The server is
itself a fork of the supervisor, made before that has threads. It forks twice for each service, and the process between
ends at once: so the service becomes a child of the supervisor, its nearest subreaper, which learns of its end as if it
had started it, and by whose death it dies. The death of the fork server concerns no service. Linux only.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import psutil

from common.process import PARENT_PID_ENV, die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE_BYTES = 1 << 17
_ANSWER_S = 60.0
"""Longest wait for a fork: the first has to wait for imports."""

logger = logging.getLogger(__name__)


class ForkFailed(Exception):
    """The fork server forked no service; the message says why."""


@dataclass(frozen=True, slots=True)
class ForkedService:
    """What a fork of the fork server has to do: it is returned in the new process."""

    module: str

    def run(self) -> None:
        """Do what `python -m MODULE` does. Raises SystemExit, and what the module raises."""
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)


class ForkServer:
    """The supervisor's end. Event loop only."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        """Take the connected socket of a fork server and its process, a child of this one."""
        sock.settimeout(0)
        self._sock, self._pid = sock, pid
        self._asking = asyncio.Lock()
        self._is_closed = False

    async def start(self, command: Sequence[str], *, environment: Mapping[str, str], stdio: int, log: int) -> int:
        """Return the pid of a new child of this process that runs a `python -P -m` command in a session of its own.

        `environment` is added to the supervisor's. Descriptor `stdio` becomes its stdin and stdout, `log` its stderr.
        Raises ForkFailed, after which there may be no fork server. A cancelled call leaves no process behind.
        """
        order = json.dumps({"command": list(command), "environment": dict(environment)}).encode()
        asking = asyncio.ensure_future(self._ask(order, (stdio, log)))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            with contextlib.suppress(ForkFailed, ProcessLookupError, ChildProcessError):
                pid = await asking
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(os.waitpid, pid, 0)
            raise

    async def _ask(self, order: bytes, descriptors: Sequence[int]) -> int:
        async with self._asking:
            if self._is_closed:
                raise ForkFailed("there is no fork server")
            try:
                socket.send_fds(self._sock, [order], descriptors)
                async with asyncio.timeout(_ANSWER_S):
                    text = await asyncio.get_running_loop().sock_recv(self._sock, _MAX_MESSAGE_BYTES)
                answer = json.loads(text)
            except (OSError, TimeoutError, ValueError) as error:
                self._close()
                raise ForkFailed(f"the fork server is lost ({error or 'no answer'})") from error
        if "error" in answer:
            raise ForkFailed(f"the fork server cannot fork: {answer['error']}")
        return int(answer["pid"])

    async def close(self) -> None:
        """End the fork server; the services go on. Harmless when repeated."""
        async with self._asking:
            self._close()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._sock.close()
        os.kill(self._pid, signal.SIGKILL)  # a child that was not reaped: its pid is its own
        os.waitpid(self._pid, 0)


def start_fork_server(modules: Sequence[str]) -> ForkServer | ForkedService | None:
    """Fork a fork server that imports `modules`; None without Linux's subreapers, or a way to name processes.

    Call in the main thread, before any other thread runs. Returns once more in each service's process, with what that
    has to do.
    """
    try:
        from setproctitle import setproctitle
    except ImportError:  # all services would look like the supervisor
        return None
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        return None
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        its.close()
        return ForkServer(ours, pid)
    ours.close()
    return _serve(its, modules, supervisor, setproctitle)


def reap_strays() -> None:
    """Reap the dead descendants of services that this process, their subreaper, has inherited."""
    session = os.getsid(0)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            # Our own children are in our session; a service leads one of its own, and is reaped by its launcher.
            is_stray = os.getsid(child.pid) not in (session, child.pid)
            if is_stray and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _serve(
    sock: socket.socket, modules: Sequence[str], supervisor: int, set_title: Callable[[str], None]
) -> ForkedService:
    """Fork services until the supervisor is gone; returns in a service's process only."""
    os.environ[PARENT_PID_ENV] = str(supervisor)
    die_with_parent()
    os.setsid()  # a terminal's Ctrl-C is for the supervisor
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # the process that started the supervisor waits for the ends of these
    os.dup2(null, 1)
    os.close(null)
    set_title("kvrelay-fork-server")
    for module in modules:
        import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to what the services share
    while True:
        text, descriptors, _, _ = socket.recv_fds(sock, _MAX_MESSAGE_BYTES, 2)
        if not text:
            os._exit(0)
        order = json.loads(text)
        try:
            pid = _fork_away()
        except OSError as error:
            sock.send(json.dumps({"error": str(error)}).encode())
            pid = -1
        if pid == 0:
            sock.close()
            set_title(" ".join(order["command"]))
            return _become(order["command"], order["environment"], *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            sock.send(json.dumps({"pid": pid}).encode())


def _fork_away() -> int:
    """Fork a process that is not our child: return 0 in it, its pid here once it has its new parent. Raises OSError."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            parent, pid = os.getpid(), os.fork()
        except OSError as error:
            os._exit(error.errno or 1)
        if pid:
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        while os.getppid() == parent:
            time.sleep(0.0005)
        return 0
    os.close(writing)
    _, status = os.waitpid(between, 0)
    text = os.read(reading, 32)
    os.close(reading)
    if not text:
        number = os.waitstatus_to_exitcode(status)
        raise OSError(number, os.strerror(number) if number > 0 else "the process between was killed")
    return int(text)


def _become(command: Sequence[str], environment: Mapping[str, str], stdio: int, log: int) -> ForkedService:
    """Make this process what `command` with these additions to its environment would have made of it."""
    os.setsid()
    for source, target in ((stdio, 0), (stdio, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in (stdio, log):
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the streams stay open
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    module = command[command.index("-m") + 1]
    sys.argv = [module, *command[command.index("-m") + 2 :]]
    return ForkedService(module)
