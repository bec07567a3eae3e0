"""A fork server: a process that imports the modules of workers, and forks each worker when it is asked to. Both ends.

    python -P -m cluster.processes.fork_server MODULE…      its stdin is a socket

A forked worker starts without its imports, which are most of a start, and shares their memory. The server forks twice,
and the process between ends at once. The worker thereby becomes a child of the supervisor, its nearest subreaper, which
waits for it as for any child, and whose death ends it. Workers outlive the server. The server ends when a file of its
modules changes, since its forks would mix two versions. Linux only.

Routers are not forked: forks share their layout in memory, which a stranger who can crash a process might learn, and
the server must not know the routers' secrets.
"""

import asyncio
import gc
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module

from cluster.processes.child import Child, Children
from common.process import PARENT_PID_ENV, become_subreaper, die_with_parent

_MAX_MESSAGE_BYTES = 1 << 17
_IMPORT_S = 120.0
_ANSWER_S = 5.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For the threads of libraries, which read these when they are loaded; workers choose the number of their own."""


class ForkServerLost(Exception):
    """The fork server ended, or did not answer in time; the message says why."""


class ForkServer:
    """The supervisor's end. Event loop only."""

    def __init__(self, child: Child, sock: socket.socket, children: Children) -> None:
        sock.settimeout(0)
        self._child, self._sock, self._children = child, sock, children
        self._asking = asyncio.Lock()
        self._ending: asyncio.Future[None] | None = None
        self._killing: set[asyncio.Future[int]] = set()
        self._last = self._expect(_IMPORT_S)
        """The answer to the last order; at first the news that the modules are imported."""

    @classmethod
    def start(cls, modules: Sequence[str], *, children: Children, without: Sequence[str], log: int) -> "ForkServer":
        """Start a server that imports `modules`, with empty values for the variables `without`. Raises OSError."""
        become_subreaper()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, **dict.fromkeys(without, ""), **_ONE_THREAD, PARENT_PID_ENV: str(os.getpid())}
        streams = [(os.POSIX_SPAWN_DUP2, its.fileno(), 0), *((os.POSIX_SPAWN_DUP2, log, fd) for fd in (1, 2))]
        command = [sys.executable, "-P", "-m", "cluster.processes.fork_server", *modules]
        with its, ExitStack() as opened:
            opened.enter_context(ours)
            pid = os.posix_spawn(command[0], command, environment, file_actions=streams, setsid=True)
            opened.pop_all()
        return cls(children.add(pid), ours, children)

    @property
    def is_closed(self) -> bool:
        """Whether it forks nothing any more."""
        return self._ending is not None

    async def fork(
        self, command: Sequence[str], environment: Mapping[str, str], log: int, stdin: int, stdout: int
    ) -> int:
        """Return the pid of a new child of this process that runs a `python -P -m` command in a session of its own.

        `environment` is added to the server's; the others are descriptors of its standard streams. Raises
        ForkServerLost, or OSError when there is no room for another process. A cancelled call leaves no process.
        """
        order = json.dumps({"command": list(command), "environment": dict(environment)}).encode()
        async with self._asking:
            await asyncio.shield(self._last)
            if self.is_closed:
                raise ForkServerLost("it was closed")
            try:
                socket.send_fds(self._sock, [order], [stdin, stdout, log])
            except OSError as error:
                self.close()
                raise ForkServerLost(str(error)) from error
            self._last = self._expect(_ANSWER_S)
            try:
                answer = await asyncio.shield(self._last)
            except asyncio.CancelledError:
                self._last.add_done_callback(self._discard)
                raise
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return answer["pid"]

    def _expect(self, limit_s: float) -> "asyncio.Future[dict[str, int]]":
        expected = asyncio.ensure_future(self._answer(limit_s))
        # Reads the exception, which asyncio would report as forgotten when no start waits for this answer.
        expected.add_done_callback(lambda done: done.cancelled() or done.exception())
        return expected

    async def _answer(self, limit_s: float) -> dict[str, int]:
        try:
            async with asyncio.timeout(limit_s):
                text = await asyncio.get_running_loop().sock_recv(self._sock, _MAX_MESSAGE_BYTES)
        except TimeoutError:
            self.close()
            raise ForkServerLost(f"no answer within {limit_s:g} s") from None
        except OSError as error:
            self.close()
            raise ForkServerLost(str(error)) from error
        if not text:
            self.close()
            raise ForkServerLost("it has ended: killed, or a file of its modules has changed")
        answer: dict[str, int] = json.loads(text)
        return answer

    def _discard(self, answered: "asyncio.Future[dict[str, int]]") -> None:
        """Kill a fork whose order was cancelled."""
        if not answered.cancelled() and answered.exception() is None and "pid" in answered.result():
            killing = asyncio.ensure_future(self._children.add(answered.result()["pid"]).kill())
            self._killing.add(killing)
            killing.add_done_callback(self._killing.discard)

    def close(self) -> None:
        """Kill the server; its forks go on. Harmless when repeated."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        await self._child.kill()
        await asyncio.gather(self._last, *self._killing, return_exceptions=True)  # its end of the socket is closed
        self._sock.close()

    async def aclose(self) -> None:
        """Kill it, and return when it is gone."""
        self.close()
        assert self._ending is not None
        await self._ending


def can_fork() -> bool:
    """Return whether a fork server can hand its forks over to this process."""
    return sys.platform.startswith("linux")


def main() -> None:
    """Fork workers until the supervisor is gone. In a worker it returns when that is over, or raises SystemExit."""
    die_with_parent()
    sock = socket.socket(fileno=os.dup(0))
    for module in sys.argv[1:]:
        import_module(module)
    stamps = _stamps()
    gc.collect()
    gc.freeze()  # a collection would write to what the workers share
    sock.send(b"{}")
    while True:
        text, descriptors, _, _ = socket.recv_fds(sock, _MAX_MESSAGE_BYTES, 3)
        if not text or _stamps() != stamps:
            return
        try:
            pid = _fork_away()
        except OSError as error:
            sock.send(json.dumps({"errno": error.errno}).encode())
        else:
            if pid == 0:
                sock.close()
                order = json.loads(text)
                _become(order["command"], order["environment"], descriptors)
                return
            sock.send(json.dumps({"pid": pid}).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _stamps() -> dict[str, int]:
    """Return when each file of a loaded module was last changed."""
    stamps = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            with suppress(OSError):
                stamps[path] = os.stat(path).st_mtime_ns  # noqa: PTH116 - thousands of them
    return stamps


def _fork_away() -> int:
    """Fork a process that is not our child: return 0 in it, its pid here once it has its new parent. Raises OSError."""
    reading, writing = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            try:
                parent, pid = os.getpid(), os.fork()
            except OSError as error:
                os._exit(error.errno or 1)
            if pid:
                os._exit(0)
            os.setsid()
            while os.getppid() == parent:
                time.sleep(0.0005)
            os.write(writing, str(os.getpid()).encode())
            return 0
        _, status = os.waitpid(between, 0)
        os.close(writing)
        writing = -1
        text = os.read(reading, 32)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if not text:
        raise OSError(max(os.waitstatus_to_exitcode(status), 1), "no process was forked")
    return int(text)


def _become(command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """Run what `command` runs, with these additions to the environment, and stdin, stdout and stderr."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the streams stay open
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    with suppress(ImportError):  # else it is shown as a fork server
        from setproctitle import setproctitle

        setproctitle(" ".join(command))
    sys.argv = list(command[command.index("-m") + 1 :])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
