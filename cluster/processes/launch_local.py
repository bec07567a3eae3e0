"""Processes as plain subprocesses of the supervisor, which die with it in every case."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cluster.processes.launcher import RunningProcess, StartFailed, identity_role
from cluster.processes.liveness import forever, process_gone, service_gone, until_over
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.run_dir import config_file_of, log_path, log_tail
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
_POLL_S = 0.005

Command = Callable[[ProcessSpec], Sequence[str]]


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
        self, *, command: Command, run_dir: Path, authority: Authority, credentials: Credentials | None = None
    ) -> None:
        """`authority` signs the processes' certificates; requests and answers travel over their standard streams.

        `credentials` are for checks whether processes still answer; None: there are no checks.
        """
        self._authority = authority
        self._credentials = credentials
        self._command = command
        self._run_dir = run_dir

    async def open(self) -> None:
        """Nothing is shared."""

    def found(self) -> frozenset[str]:
        """Return no names: subprocesses die with their supervisor."""
        return frozenset()

    async def close(self) -> None:
        """Nothing is shared."""

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a subprocess, its stderr appended to its log, and wait for its ready line."""
        path = log_path(self._run_dir, spec.name)
        with open_log(path) as log:
            offset = log.tell()
            process = await asyncio.create_subprocess_exec(
                *self._command(spec),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **spec.env, PARENT_PID_ENV: str(os.getpid()), LOG_PATH_ENV: str(path)},
                start_new_session=True,  # a terminal's Ctrl-C is for the supervisor, which stops them in order
            )
        lines = _Lines(process, partial(self._authority.enrol, role=identity_role(spec.role), name=spec.name))
        try:
            ready = await lines.until_ready()
        except ValueError as error:
            await _kill(process)
            raise StartFailed(f"{spec.name}: {error}") from error
        except BaseException:
            await _kill(process)
            raise
        if ready is None:
            code = await _wait_or_kill(process, _EXIT_GRACE_S)  # its stdout is closed: it is about to exit
            reason = f"{spec.name}: {_describe_exit(code)} before it was ready"
            raise StartFailed(f"{reason}\n{log_tail(path, offset=offset)}".rstrip())
        silent = forever
        if self._credentials is not None:
            connect = connect_to(identity_role(spec.role), self._credentials)
            silent = partial(service_gone, ready.admin_address, connect, is_here=True)
        return _Subprocess(process, ready, lines, silent)


class _Subprocess:
    """A RunningProcess."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        ready: Ready,
        lines: "_Lines",
        silent: Callable[[], Coroutine[Any, Any, str]],
    ) -> None:
        self.ready = ready
        self._silent = silent
        self.identity = ProcessIdentity.of(process.pid)
        self._process = process
        # Answers renewals of its certificate, and keeps its pipe from filling up.
        self._drain = asyncio.get_running_loop().create_task(lines.until_end())

    async def exited(self) -> str:
        return await until_over(self._died(), self._silent(), self._kill)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _died(self) -> str:
        return _describe_exit(await _exit_code(self._process))

    async def stop(self, grace_s: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await _wait_or_kill(self._process, grace_s)
        self._drain.cancel()
        await asyncio.wait([self._drain])


class _Lines:
    """Reads a process's stdout: its ready line, and certificate requests, which it answers on stdin."""

    def __init__(self, process: asyncio.subprocess.Process, enrol: Callable[[EnrolmentRequest], Enrolment]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self._stdout, self._stdin = process.stdout, process.stdin
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
        """Answer requests until stdout ends."""
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


async def _wait_or_kill(process: asyncio.subprocess.Process, grace_s: float) -> int:
    try:
        async with asyncio.timeout(grace_s):
            return await _exit_code(process)
    except TimeoutError:
        return await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> int:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    return await _exit_code(process)


async def _exit_code(process: asyncio.subprocess.Process) -> int:
    """Return the exit status of a process once it is over.

    `wait` would also wait for the end of its streams, which processes that it has started may hold.
    """
    identity = ProcessIdentity.of(process.pid)
    if identity is not None:
        await process_gone(identity)
    while process.returncode is None:  # noqa: ASYNC110 - asyncio is about to learn it, and has no event for it alone
        await asyncio.sleep(_POLL_S)
    return process.returncode


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
