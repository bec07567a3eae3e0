"""Generator processes as seen by the load test."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from typing import Any

from common.process import PARENT_PID_ENV
from measure.load.wire import GeneratorOrder, Message, Unpacker, pack

_READ_BYTES = 1 << 18
_STDERR_BYTES = 4096


class GeneratorProcess:
    """A running `measure.load.process`. The caller of `start` must call `kill` and `wait` on every path."""

    def __init__(self, number: int, process: Process) -> None:
        self.number = number
        self._process = process
        self._stderr = b""

    @classmethod
    async def start(cls, number: int) -> "GeneratorProcess":
        """Start a process, which dies with this one, however that ends."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "measure.load.process",
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=os.environ | {PARENT_PID_ENV: str(os.getpid())},
            # A group of its own: Ctrl-C at a terminal reaches a whole group and must not end a process that starts and
            # does not ignore SIGINT yet.
            process_group=0,
        )
        return cls(number, process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def order(self, kind: GeneratorOrder, *values: Any) -> None:
        """Send an order. It is lost when the process has ended, which shows in `reports`."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(pack(kind, *values))

    async def reports(self) -> AsyncIterator[Message]:
        """Yield reports until the process closes its end."""
        stdout, unpacker = self._process.stdout, Unpacker()
        assert stdout is not None
        while data := await stdout.read(_READ_BYTES):
            for report in unpacker.feed(data):
                yield report

    async def read_stderr(self) -> None:
        """Read stderr until the process closes it, and keep the last part."""
        stderr = self._process.stderr
        assert stderr is not None
        while data := await stderr.read(_STDERR_BYTES):
            self._stderr = (self._stderr + data)[-_STDERR_BYTES:]

    async def epitaph(self) -> str:
        """Wait for the end of the process and describe it."""
        code = await self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        said = self._stderr.decode(errors="replace").strip()
        return f"generator process {self.number} {how}" + (f":\n{said}" if said else "")

    def kill(self) -> None:
        """Kill the process unless it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # not asyncio's own kill, which polls first and so takes the exit code from the loop's watcher
                os.kill(self._process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait for the end of the process."""
        await self._process.wait()
