"""Processes as plain subprocesses of the supervisor. They die with it, however it dies."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cluster.processes.launcher import RunningProcess, StartFailed, identity_role, log_path, log_tail
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.resolved_config import config_file_of
from common.output_log import LOG_PATH_ENV, open_log
from common.process import PARENT_PID_ENV, ProcessIdentity, Ready, parse_ready
from common.trust.authority import Authority
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


def service_command(config_path: Path) -> Command:
    """Return how a process of this project is started with a configuration file, or with its own beside that one."""

    def command(spec: ProcessSpec) -> Sequence[str]:
        is_router = spec.role is ProcessRole.ROUTER
        who = ["--index", str(spec.index)] if is_router else ["--role", str(spec.role), "--worker-id", spec.name]
        where = ["--host", spec.host or "127.0.0.1", "--port", str(spec.port)]
        # -P: a folder of the user's called `router` must not shadow the package.
        module = [sys.executable, "-P", "-m", _MODULES[spec.role]]
        return [*module, "--config", str(config_file_of(spec, config_path)), *who, *where, "--die-with-parent"]

    return command


class LocalLauncher:
    """A Launcher of subprocesses. All methods on the event loop of the main thread.

    (The kernel's death signal follows the thread that forked, not the process.)
    """

    def __init__(self, *, command: Command, run_dir: Path, authority: Authority) -> None:
        """`authority` signs the processes' certificates, over their standard streams."""
        self._authority = authority
        self._command = command
        self._run_dir = run_dir

    async def open(self) -> None:
        """Nothing is shared."""

    def found(self) -> frozenset[str]:
        """Return nothing: subprocesses die with their supervisor."""
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
        return _Subprocess(process, ready, lines)


class _Subprocess:
    """A RunningProcess."""

    def __init__(self, process: asyncio.subprocess.Process, ready: Ready, lines: "_Lines") -> None:
        self.ready = ready
        self.identity = ProcessIdentity.of(process.pid)
        self._process = process
        # Renewals of its certificate; and a full pipe would stop it.
        self._drain = asyncio.get_running_loop().create_task(lines.until_end())

    async def exited(self) -> str:
        code = await self._process.wait()
        return _describe_exit(code)

    async def stop(self, grace_s: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await _wait_or_kill(self._process, grace_s)
        self._drain.cancel()
        await asyncio.wait([self._drain])


class _Lines:
    """What a process says on stdout: that it is ready, and its requests for certificates, which are answered."""

    def __init__(self, process: asyncio.subprocess.Process, enrol: Callable[[EnrolmentRequest], Enrolment]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self._stdout, self._stdin = process.stdout, process.stdin
        self._enrol = enrol

    async def until_ready(self) -> Ready | None:
        """Return what the process says when it serves, or None when its stdout ends before.

        Raises ValueError when it cannot be given a certificate: it would wait for one in vain.
        """
        while text := await self._next():
            ready = parse_ready(text)
            if ready is not None:
                return ready
            await self._answer(text)
        return None

    async def until_end(self) -> None:
        """Answer until its stdout ends."""
        while text := await self._next():
            try:
                await self._answer(text)
            except ValueError as error:
                logger.error("certificate refused: %s", error)

    async def _next(self) -> str:
        """Return the next line, or the end of one that is longer than any of ours; empty at the end."""
        while True:
            try:
                return (await self._stdout.readline()).decode(errors="replace")
            except ValueError:  # the reader has dropped what did not fit
                continue

    async def _answer(self, text: str) -> None:
        answer = answer_to(text, self._enrol)
        if answer is not None:
            with contextlib.suppress(ConnectionError):  # it has just died
                self._stdin.write(answer.encode())
                await self._stdin.drain()


async def _wait_or_kill(process: asyncio.subprocess.Process, grace_s: float) -> int:
    try:
        async with asyncio.timeout(grace_s):
            return await process.wait()
    except TimeoutError:
        return await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> int:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    return await process.wait()


def _describe_exit(code: int) -> str:
    if code == 0:  # nothing of ours ends by itself
        return "terminated"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
