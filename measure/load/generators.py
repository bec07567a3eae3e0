"""The generator processes of one run, and the sessions that each of them plays."""

import asyncio
import contextlib
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from typing import Any

from common.clock import Clock
from common.process import PARENT_PID_ENV
from measure.load.dispatch import Dispatcher
from measure.load.player import RequestTerms
from measure.load.records import RequestRecord
from measure.load.selfcheck import Evidence, is_busy
from measure.load.targets.interface import TargetSpec
from measure.load.wire import (
    GeneratorOrder,
    Message,
    Pulse,
    Report,
    Unpacker,
    from_wire,
    pack,
    to_wire,
)

_READ_BYTES = 1 << 18
_STDERR_BYTES = 4096
_READY_TIMEOUT_S = 60.0
_GOODBYE_TIMEOUT_S = 10.0


class GeneratorProcess:
    """A running `measure.load.process`. The caller of `start` must call `kill` and `wait` on every path."""

    def __init__(self, number: int, process: Process) -> None:
        self.number = number
        self.is_ready = self.has_begun = self.has_said_bye = False
        self.pulses: list[Pulse] = []
        self._process = process
        self._stderr = b""

    @classmethod
    async def start(cls, number: int) -> "GeneratorProcess":
        """Start a process, which dies with this one, however that ends."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
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

    async def ending(self) -> str:
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


class Generators:
    """Starts processes, hands them sessions, adds one when all are busy, and ends them on every path.

    One event loop. `failure` describes what has broken, or is empty; no method raises it.
    """

    def __init__(
        self, target: TargetSpec, dispatcher: Dispatcher, clock: Clock, evidence: Evidence, tasks: asyncio.TaskGroup
    ) -> None:
        self._target = target
        self._dispatcher = dispatcher
        self._clock = clock
        self._evidence = evidence
        self._tasks = tasks
        self._members: list[GeneratorProcess] = []
        self._living: set[GeneratorProcess] = set()
        self._terms: RequestTerms | None = None
        self._changed = asyncio.Event()
        self._is_stopped = False
        self.on_record: Callable[[RequestRecord], None] = lambda _request: None
        self.failure = ""

    async def start(self, num_processes: int) -> None:
        """Start processes and wait until they are ready, or `failure` is set."""
        for _ in range(num_processes):
            await self._start_one()
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                while not (self.failure or all(member.is_ready for member in self._members)):
                    await self._change()
        except TimeoutError:
            self.failure = f"a generator process was not ready after {_READY_TIMEOUT_S:.0f} s"

    def begin(self, terms: RequestTerms) -> None:
        """Announce the clock of the run; processes that are ready get sessions from now on."""
        self._terms = terms
        for member in self._members:
            self._join(member)

    async def work(self, *, until_s: float) -> None:
        """Hand out the workload until it is done, `stop` was called, `failure` is set, or `until_s` of the run."""
        assert self._terms is not None
        while not (self._is_stopped or self.failure):
            now_s = self._clock.monotonic() - self._terms.origin_s
            for play in self._dispatcher.take(now_s):
                self._members[play.process].order(GeneratorOrder.PLAY, to_wire(play.session), play.stream)
            if self._dispatcher.is_done or now_s >= until_s:
                return
            await self._change(within_s=min(self._dispatcher.next_s, until_s) - now_s)

    def stop(self) -> None:
        """Hand out nothing more and make `end` cancel all running requests."""
        self._is_stopped = True
        self._changed.set()

    async def end(self) -> None:
        """End all processes, which cancel and report running requests. None is left when this returns or raises."""
        try:
            for member in self._living:
                if member.has_begun and not self._dispatcher.is_done:
                    member.order(GeneratorOrder.STOP)
                member.order(GeneratorOrder.FINISH)
            self._dispatcher.stop()
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                while self._living:
                    await self._change()
        except TimeoutError:
            self.failure = self.failure or f"a generator process did not end within {_GOODBYE_TIMEOUT_S:.0f} s"
        finally:
            for member in self._members:
                member.kill()

    async def _start_one(self) -> None:
        member = await GeneratorProcess.start(len(self._members))
        self._members.append(member)
        self._living.add(member)
        self._tasks.create_task(self._listen(member))
        member.order(GeneratorOrder.SETUP, to_wire(self._target))

    async def _listen(self, member: GeneratorProcess) -> None:
        """Handle the reports of a process until it ends."""
        reading = self._tasks.create_task(member.read_stderr())
        try:
            async for report in member.reports():
                self._take(member, report)
            await reading
            if not member.has_said_bye and not self.failure:
                self.failure = await member.ending()
        finally:
            member.kill()
            await member.wait()
            self._living.discard(member)
            self._changed.set()

    def _take(self, member: GeneratorProcess, report: Message) -> None:
        number, kind, values = member.number, Report(report[0]), report[1:]
        match kind:
            case Report.RECORD:
                self.on_record(from_wire(RequestRecord, values[0]))
                return
            case Report.READY:
                member.is_ready = True
                self._evidence.runs_first &= values[0]
                if self._terms is not None:
                    self._join(member)
            case Report.SESSION_OVER:
                self._dispatcher.session_over(number, values[0])
            case Report.PULSE:
                self._note_pulse(member, Pulse(**values[0]))
                return
            case Report.BYE:
                member.has_said_bye = True
        self._changed.set()

    def _join(self, member: GeneratorProcess) -> None:
        assert self._terms is not None
        member.has_begun = True
        self._evidence.pulses[member.number] = member.pulses
        member.order(GeneratorOrder.BEGIN, to_wire(self._terms))
        self._dispatcher.add_process(member.number)

    def _note_pulse(self, member: GeneratorProcess, pulse: Pulse) -> None:
        if not member.has_begun:
            return
        member.pulses.append(pulse)
        if len(self._members) < self._evidence.max_processes and self._all_are_busy():
            self._tasks.create_task(self._start_one())

    def _all_are_busy(self) -> bool:
        """Whether every process has begun and was busy in its last two pulses."""
        return not self._is_stopped and all(
            len(member.pulses) > 1 and all(map(is_busy, member.pulses[-2:])) for member in self._members
        )

    async def _change(self, within_s: float = math.inf) -> None:
        """Wait until something has happened that others wait for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if within_s == math.inf else max(0.0, within_s)):
                await self._changed.wait()
        self._changed.clear()
