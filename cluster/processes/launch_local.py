"""Processes as plain subprocesses of the supervisor, which die with it in every case."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cluster.processes.child import Child, Children, PipedChild
from cluster.processes.fork_server import ForkServer, ForkServerLost, can_fork
from cluster.processes.launcher import RunningProcess, StartFailed, identity_role
from cluster.processes.liveness import forever, service_gone, until_over
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.run_dir import config_file_of, log_path, log_tail
from common.config import ConfigError, load_config
from common.log import LOG_PATH_ENV, open_log
from common.process import PARENT_PID_ENV, CannotStart, Ready, describe_exit, parse_failure, parse_ready
from common.trust.authority import Authority
from common.trust.channels import connect_to
from common.trust.credentials import Credentials
from common.trust.enrolment import Enrolment, EnrolmentRequest
from common.trust.pipe import answer_to

_MODULES = {
    ProcessRole.ROUTER: "router",
    ProcessRole.PREFILL: "cluster.worker_process",
    ProcessRole.DECODE: "cluster.worker_process",
}

logger = logging.getLogger(__name__)

_EXIT_GRACE_S = 5.0

Command = Callable[[ProcessSpec], Sequence[str]]
Modules = Callable[[ProcessSpec], Sequence[str]]


def service_command(config_path: Path) -> Command:
    """Return the Command that starts the services with a configuration file, or with a file of their own beside it."""

    def command(spec: ProcessSpec) -> Sequence[str]:
        is_router = spec.role is ProcessRole.ROUTER
        name = ["--index", str(spec.index)] if is_router else ["--role", str(spec.role), "--worker-id", spec.name]
        listen = ["--host", spec.host or "127.0.0.1", "--port", str(spec.port)]
        # -P: a folder called `router` in the working directory must not shadow the package.
        module = [sys.executable, "-P", "-m", _MODULES[spec.role]]
        return [*module, "--config", str(config_file_of(spec, config_path)), *name, *listen, "--die-with-parent"]

    return command


def modules_to_fork(spec: ProcessSpec, config_path: Path) -> Sequence[str]:
    """Return what a fork server imports before it forks a process; nothing for one that has to start by itself."""
    if spec.role is ProcessRole.ROUTER or not can_fork():
        return ()
    engine = (spec.config or load_config(config_path)).model.engine
    if engine == "vllm":  # it sets what libraries read when they are imported
        return ()
    worker = f"{_MODULES[spec.role]}.server"
    return (worker,) if engine == "fake" else (worker, "engine.loading")


class LocalLauncher:
    """A Launcher of subprocesses. Event loop of the main thread only: the kernel's death signal follows that thread."""

    def __init__(
        self,
        *,
        command: Command,
        run_dir: Path,
        authority: Authority,
        credentials: Credentials | None = None,
        modules: Modules = lambda _spec: (),
    ) -> None:
        """`authority` signs the processes' certificates; requests and answers travel over their standard streams.

        `credentials` are for checks whether processes still answer; None: there are no checks. `modules`: what a fork
        server imports before it forks a process; empty: the process starts by itself.
        """
        self._authority = authority
        self._credentials = credentials
        self._command = command
        self._modules = modules
        self._run_dir = run_dir
        self._children = Children()
        self._reaping: asyncio.Task[None] | None = None
        self._fork_server: ForkServer | None = None
        self._is_closed = False
        self._forks: tuple[Sequence[str], Sequence[str]] = (), ()
        """Modules of the fork server, and the variables that are empty for it."""

    async def open(self) -> None:
        """Begin to reap dead children that nothing waits for. A fork server starts when it is needed."""
        self._reaping = asyncio.create_task(self._children.reap_strays(), name="reap strays")

    def found(self) -> frozenset[str]:
        """Return no names: subprocesses die with their supervisor."""
        return frozenset()

    def missing_room_of(self, spec: ProcessSpec) -> str:
        """Return nothing: a subprocess starts at once."""
        return ""

    async def close(self) -> None:
        """End the fork server."""
        self._is_closed = True
        if self._fork_server is not None:
            await self._fork_server.aclose()
        if self._reaping is not None:
            self._reaping.cancel()
            await asyncio.wait([self._reaping])

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a subprocess, its stderr appended to its log, and wait for its ready line."""
        path = log_path(self._run_dir, spec.name)
        try:
            with open_log(path) as log:
                offset = log.tell()
                environment = {**spec.env, PARENT_PID_ENV: str(os.getpid()), LOG_PATH_ENV: str(path)}
                child = await self._child(spec, environment, log.fileno())
        except (OSError, ConfigError) as error:
            raise StartFailed(f"{spec.name}: cannot start a process: {error}") from error
        lines = _Lines(child, partial(self._authority.enrol, role=identity_role(spec.role), name=spec.name))
        try:
            ready = await lines.until_ready()
            if ready is None:
                code = await child.exit_code_within(_EXIT_GRACE_S)  # its stdout is closed: it is about to exit
                reason = f"{spec.name}: {describe_exit(code)} before it was ready"
                raise StartFailed(f"{reason}\n{log_tail(path, offset=offset)}".rstrip())
        except BaseException as error:
            child.stdin.close()
            await child.kill()
            if isinstance(error, CannotStart):
                raise StartFailed.explained(spec.name, error) from error
            if isinstance(error, ValueError):
                raise StartFailed(f"{spec.name}: {error}") from error
            raise
        silent = forever
        if self._credentials is not None:
            connect = connect_to(identity_role(spec.role), self._credentials)
            silent = partial(service_gone, ready.admin_address, connect, is_here=True)
        return _Subprocess(child, ready, lines, silent)

    async def _child(self, spec: ProcessSpec, environment: Mapping[str, str], log: int) -> PipedChild:
        """Return a new child in a session of its own: a terminal's Ctrl-C is for the supervisor. Raises OSError."""
        command, modules = self._command(spec), self._modules(spec)
        for _ in range(2 if modules else 0):
            if self._is_closed:
                raise StartFailed(f"{spec.name}: the launcher is closed")
            server = self._server(modules, [name for name, value in spec.env.items() if not value])
            try:
                # Each attempt has its own pipes: a fork that a lost server has not reported reads the end of its stdin.
                return await self._children.start(partial(server.fork, command, environment, log))
            except ForkServerLost as error:
                logger.warning("fork server lost; starts go on", extra={"reason": str(error), "for": spec.name})
        return await self._children.start(partial(_spawn, command, {**os.environ, **environment}, log))

    def _server(self, modules: Sequence[str], without: Sequence[str]) -> ForkServer:
        """Return the fork server, or a new one if it is lost or has imported other modules."""
        if self._fork_server is None or self._fork_server.is_closed or self._forks != (modules, without):
            if self._fork_server is not None:
                self._fork_server.close()
            with open_log(log_path(self._run_dir, "fork-server")) as log:
                self._fork_server = ForkServer.start(
                    modules, children=self._children, without=without, log=log.fileno()
                )
            self._forks = modules, without
        return self._fork_server


async def _spawn(command: Sequence[str], environment: Mapping[str, str], log: int, stdin: int, stdout: int) -> int:
    streams = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate((stdin, stdout, log))]
    return os.posix_spawn(  # noqa: ASYNC221 - takes a millisecond
        command[0], [*command], environment, file_actions=streams, setsid=True
    )


class _Subprocess:
    """A RunningProcess."""

    def __init__(
        self, child: Child, ready: Ready, lines: "_Lines", silent: Callable[[], Coroutine[Any, Any, str]]
    ) -> None:
        self.ready = ready
        self.identity = child.identity
        self._child = child
        self._silent = silent
        # Answers renewals of its certificate, and keeps its pipe from filling up.
        self._drain = asyncio.get_running_loop().create_task(lines.until_end())

    async def exited(self) -> str:
        return await until_over(self._died(), self._silent(), partial(self._child.signal, signal.SIGKILL))

    async def _died(self) -> str:
        return describe_exit(await self._child.exit_code())

    async def stop(self, grace_s: float) -> None:
        self._child.signal(signal.SIGTERM)
        await self._child.exit_code_within(grace_s)
        self._drain.cancel()
        await asyncio.wait([self._drain])


class _Lines:
    """Reads a process's stdout: its ready line, and certificate requests, which it answers on stdin."""

    def __init__(self, child: PipedChild, enrol: Callable[[EnrolmentRequest], Enrolment]) -> None:
        self._stdout, self._stdin = child.stdout, child.stdin
        self._enrol = enrol

    async def until_ready(self) -> Ready | None:
        """Return the ready line, or None if stdout ends before it.

        Raises CannotStart with the reason that the process gives instead, and ValueError
        if a certificate request is invalid: the process would wait for the answer in vain.
        """
        while text := await self._next():
            ready = parse_ready(text)
            if ready is not None:
                return ready
            if failure := parse_failure(text):
                raise failure
            self._answer(text)
        return None

    async def until_end(self) -> None:
        """Answer requests until stdout ends, then close stdin."""
        with contextlib.closing(self._stdin):
            while text := await self._next():
                try:
                    self._answer(text)
                except ValueError as error:
                    logger.error("certificate refused: %s", error)

    async def _next(self) -> str:
        """Return the next line, empty at the end of stdout; only the rest of an overlong line."""
        while True:
            try:
                return (await self._stdout.readline()).decode(errors="replace")
            except ValueError:  # the reader has dropped an overlong part
                continue

    def _answer(self, text: str) -> None:
        answer = answer_to(text, self._enrol)
        if answer is not None:
            self._stdin.write(answer.encode())
