"""Processes as plain subprocesses of the supervisor, which die with it in every case."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cluster.processes.fork_server import ForkFailed, ForkServer, reap_strays
from cluster.processes.launcher import RunningProcess, StartFailed, identity_role
from cluster.processes.liveness import forever, process_gone, service_gone, until_over
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.run_dir import config_file_of, log_path, log_tail
from common.config import ServingConfig
from common.log import LOG_PATH_ENV, open_log
from common.process import EXIT_HUNG, PARENT_PID_ENV, ProcessIdentity, Ready, parse_ready
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


def modules_to_fork(config: ServingConfig) -> Sequence[str]:
    """Return the modules that a fork server of these services imports; none if they have to start by themselves."""
    if config.launcher != "local" or config.model.engine == "vllm":  # vLLM sets what libraries read when imported
        return ()
    services = [f"{module}.server" for module in dict.fromkeys(_MODULES.values())]
    return services if config.model.engine == "fake" else [*services, "engine.loading"]


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


class LocalLauncher:
    """A Launcher of subprocesses. Event loop of the main thread only: the kernel's death signal follows that thread."""

    def __init__(
        self,
        *,
        command: Command,
        run_dir: Path,
        authority: Authority,
        credentials: Credentials | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """`authority` signs the processes' certificates; requests and answers travel over their standard streams.

        `credentials` are for checks whether processes still answer; None: there are no checks. Without a `fork_server`,
        or once it is lost, each process imports its modules itself.
        """
        self._authority = authority
        self._credentials = credentials
        self._command = command
        self._run_dir = run_dir
        self._fork_server = fork_server

    async def open(self) -> None:
        """Nothing is shared but the fork server, which is there already."""

    def found(self) -> frozenset[str]:
        """Return no names: subprocesses die with their supervisor."""
        return frozenset()

    async def close(self) -> None:
        """End the fork server."""
        if self._fork_server is not None:
            await self._fork_server.close()

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a subprocess, its stderr appended to its log, and wait for its ready line."""
        path = log_path(self._run_dir, spec.name)
        own, given = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=own)
        with open_log(path) as log, given:
            offset = log.tell()
            environment = {**spec.env, PARENT_PID_ENV: str(os.getpid()), LOG_PATH_ENV: str(path)}
            child = _Child(await self._spawn(self._command(spec), environment, stdio=given.fileno(), log=log.fileno()))
        lines = _Lines(reader, writer, partial(self._authority.enrol, role=identity_role(spec.role), name=spec.name))
        try:
            ready = await lines.until_ready()
        except BaseException as error:
            writer.close()
            await child.kill()
            if isinstance(error, ValueError):
                raise StartFailed(f"{spec.name}: {error}") from error
            raise
        if ready is None:
            writer.close()
            code = await child.exit_code_within(_EXIT_GRACE_S)  # its stdout is closed: it is about to exit
            reason = f"{spec.name}: {_describe_exit(code)} before it was ready"
            raise StartFailed(f"{reason}\n{log_tail(path, offset=offset)}".rstrip())
        silent = forever
        if self._credentials is not None:
            connect = connect_to(identity_role(spec.role), self._credentials)
            silent = partial(service_gone, ready.admin_address, connect, is_here=True)
        return _Subprocess(child, ready, lines, silent)

    async def _spawn(self, command: Sequence[str], environment: Mapping[str, str], *, stdio: int, log: int) -> int:
        """Return the pid of a new child in a session of its own: a terminal's Ctrl-C is for the supervisor alone."""
        if self._fork_server is not None:
            try:
                return await self._fork_server.start(command, environment=environment, stdio=stdio, log=log)
            except ForkFailed as error:
                logger.warning("processes import their modules themselves", extra={"reason": str(error)})
                await self.close()
                self._fork_server = None
        streams = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in ((stdio, 0), (stdio, 1), (log, 2))]
        environment = {**os.environ, **environment}
        return os.posix_spawn(  # noqa: ASYNC221 - takes a millisecond
            command[0], [*command], environment, file_actions=streams, setsid=True
        )


class _Child:
    """A child of this process. Event loop only."""

    def __init__(self, pid: int) -> None:
        self.identity = ProcessIdentity.of(pid)
        self._pid = pid
        self._code: int | None = None

    async def exit_code(self) -> int:
        """Return its exit status once it is over, negative for a signal; several tasks may wait."""
        if self.identity is not None:
            await process_gone(self.identity)
        if self._code is None:
            _, status = os.waitpid(self._pid, 0)  # noqa: ASYNC222 - it is over
            self._code = os.waitstatus_to_exitcode(status)
            reap_strays()
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
            os.kill(self._pid, number)


class _Subprocess:
    """A RunningProcess."""

    def __init__(
        self, child: _Child, ready: Ready, lines: "_Lines", silent: Callable[[], Coroutine[Any, Any, str]]
    ) -> None:
        self.ready = ready
        self.identity = child.identity
        self._child = child
        self._silent = silent
        # Answers renewals of its certificate, and keeps its socket from filling up.
        self._drain = asyncio.get_running_loop().create_task(lines.until_end())

    async def exited(self) -> str:
        return await until_over(self._died(), self._silent(), partial(self._child.signal, signal.SIGKILL))

    async def _died(self) -> str:
        return _describe_exit(await self._child.exit_code())

    async def stop(self, grace_s: float) -> None:
        self._child.signal(signal.SIGTERM)
        await self._child.exit_code_within(grace_s)
        self._drain.cancel()
        await asyncio.wait([self._drain])


class _Lines:
    """Reads a process's stdout: its ready line, and certificate requests, which it answers on stdin."""

    def __init__(
        self,
        stdout: asyncio.StreamReader,
        stdin: asyncio.StreamWriter,
        enrol: Callable[[EnrolmentRequest], Enrolment],
    ) -> None:
        self._stdout, self._stdin = stdout, stdin
        self._enrol = enrol

    async def until_ready(self) -> Ready | None:
        """Return the ready line, or None if stdout ends before it.

        Raises ValueError if a certificate request is invalid: the process would wait for the answer in vain.
        """
        while text := await self._next():
            ready = parse_ready(text)
            if ready is not None:
                return ready
            await self._answer(text)
        return None

    async def until_end(self) -> None:
        """Answer requests until stdout ends, then close stdin."""
        with contextlib.closing(self._stdin):
            while text := await self._next():
                try:
                    await self._answer(text)
                except ValueError as error:
                    logger.error("certificate refused: %s", error)

    async def _next(self) -> str:
        """Return the next line, empty at the end of stdout; only the rest of an overlong line."""
        while True:
            try:
                return (await self._stdout.readline()).decode(errors="replace")
            except ValueError:  # the reader has dropped an overlong part
                continue

    async def _answer(self, text: str) -> None:
        answer = answer_to(text, self._enrol)
        if answer is not None:
            with contextlib.suppress(ConnectionError):  # the process has just died
                self._stdin.write(answer.encode())
                await self._stdin.drain()


def _describe_exit(code: int) -> str:
    if code == 0:  # no service ends by itself
        return "terminated"
    if code == EXIT_HUNG:
        return f"hung, and ended itself (exit status {code})"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
