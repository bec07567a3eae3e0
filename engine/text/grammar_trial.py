"""Tries grammars in processes of their own, which may take long, run out of memory or crash in place of the worker.

`python -m engine.grammar_trial` reads one line that describes the compiler and answers it with one. From then on each
line that it reads begins a trial or ends one, and each that it writes is the outcome of one. A trial is a fork, so that
trials run side by side, none needs the vocabulary to be read again, and nothing is left of one that has ended. All of
them die with the worker.
"""

import asyncio
import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from common.errors import InvalidRequest, Overloaded
from common.process import PARENT_PID_ENV, die_with_parent
from engine.text.grammar import Grammars

TRIAL_S = 2.0
"""CPU time that a grammar may take to compile and to compute its first mask."""
WALL_S = 6.0
"""Longest time until that is known, on a host with other work."""
START_S = 15.0
"""Longest time until a new process is ready."""
MEMORY_BYTES = 1 << 29
"""Address space that a trial may take beyond that of the process that it is a fork of."""
_MAX_REASON_CHARS = 500
_MAX_OUTCOME_BYTES = 4096
"""Bound of what a trial writes; a pipe holds it until it is read."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""A process with threads cannot be forked safely."""
_BUSY = (signal.SIGALRM, signal.SIGKILL)
"""Signals that end a trial because the host has no time, or no memory, for it."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals of a library at fault; without memory it aborts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a trial that came to an end."""

    reason: str
    """Why the grammar is refused; empty when it is not."""
    num_bytes: int
    """Memory that the compiled grammar keeps."""


@dataclass(frozen=True, slots=True)
class _Trial:
    verdict: "asyncio.Future[Verdict]"
    spend: Callable[[float], None]


class GrammarTrials:
    """The trials of a worker. Their common process starts when it is first needed. Event loop only."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._forker: asyncio.Task[_Forker] | None = None
        """The process, or its start."""

    async def run(self, structure: str, spend: Callable[[float], None]) -> Verdict:
        """Return what a trial of a structure's JSON text finds. Cancelling the call ends the trial.

        `spend` gets the CPU seconds of the trial when it has ended, also after the call. Raises Overloaded when the
        host is too busy to find out.
        """
        try:
            forker = await self._started()
        except OSError:
            raise _busy() from None
        try:
            async with asyncio.timeout(2 * WALL_S):
                return await forker.run(structure, spend)
        except TimeoutError:  # the process itself stands
            await forker.aclose()
            raise _busy() from None

    async def aclose(self) -> None:
        """End the process and its trials."""
        if self._forker is not None:
            self._forker.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await (await self._forker).aclose()

    async def _started(self) -> "_Forker":
        """Return the process, a new one if the last has ended. A cancelled caller leaves the start to the others."""
        forker = self._forker
        if forker is None or (forker.done() and (forker.exception() or forker.result().has_ended)):
            forker = self._forker = asyncio.create_task(_Forker.start(self._grammars))
        return await asyncio.shield(forker)


class _Forker:
    """A worker's end of the process. Event loop only."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", outcomes: asyncio.StreamReader, orders: asyncio.StreamWriter
    ) -> None:
        self._process, self._outcomes, self._orders = process, outcomes, orders
        self._trials: dict[int, _Trial] = {}
        self._num_trials = 0
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, grammars: Grammars) -> "_Forker":
        """Start a process and wait until it is ready. Raises OSError."""
        description = await asyncio.to_thread(lambda: json.dumps(grammars.description).encode() + b"\n")
        process, ours = _spawn()
        outcomes, orders = await asyncio.open_unix_connection(sock=ours)
        try:
            orders.write(description)
            async with asyncio.timeout(START_S):
                if not await outcomes.readline():
                    raise BrokenPipeError
        except BaseException:
            await _end(process, orders)
            raise
        return cls(process, outcomes, orders)

    @property
    def has_ended(self) -> bool:
        """Whether no trial can begin here any more."""
        return self._orders.is_closing()

    async def run(self, structure: str, spend: Callable[[float], None]) -> Verdict:
        """Run a trial as `GrammarTrials.run` does."""
        self._num_trials += 1
        number = self._num_trials
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._trials[number] = _Trial(verdict, spend)
        self._order(number, {"cpu_s": TRIAL_S, "wall_s": WALL_S, "structure": structure})
        try:
            return await verdict
        finally:
            if number in self._trials:
                self._order(number, {})

    async def aclose(self) -> None:
        """End the process, and with it its trials."""
        self._reading.cancel()
        await asyncio.wait((self._reading,))

    def _order(self, number: int, order: dict[str, Any]) -> None:
        self._orders.write(json.dumps([number, order]).encode() + b"\n")

    async def _read(self) -> None:
        try:
            while line := await self._outcomes.readline():
                number, outcome = json.loads(line)
                self._take(self._trials.pop(number), **outcome)
        finally:
            await _end(self._process, self._orders)
            for trial in self._trials.values():
                if not trial.verdict.done():
                    trial.verdict.set_exception(_busy())

    def _take(self, trial: _Trial, *, cpu_s: float, signal_number: int, reason: str, num_bytes: int) -> None:
        trial.spend(cpu_s)
        if trial.verdict.done():  # its caller has left
            return
        if signal_number in _BUSY:
            trial.verdict.set_exception(_busy())
            return
        if signal_number:
            crash = f"it crashes the compiler (signal {signal_number})"
            costs = f"it takes more than {TRIAL_S:g} s or too much memory"
            reason = f"structured_outputs cannot be compiled: {crash if signal_number in _CRASHES else costs}"
        trial.verdict.set_result(Verdict(reason=reason, num_bytes=num_bytes))


def _spawn() -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Return a new process and the worker's end of its streams."""
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.text.grammar_trial"],
            stdin=its.fileno(),
            stdout=its.fileno(),
            env={**os.environ, **_ONE_THREAD, PARENT_PID_ENV: str(os.getpid())},
            start_new_session=True,
        )
    return process, ours


async def _end(process: "subprocess.Popen[bytes]", orders: asyncio.StreamWriter) -> None:
    process.kill()
    orders.close()
    await asyncio.to_thread(process.wait)


def _busy() -> Overloaded:
    return Overloaded("the host is too busy to compile structured_outputs", retry_after_s=1.0)


class _Forks:
    """The process's own end: the running trials by their pipes, each of which is closed when its trial has ended."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._pids: dict[int, int] = {}
        self._pipes: dict[int, int] = {}
        """Numbers of trials."""
        self._poll = select.poll()

    def serve(self) -> None:
        """Begin and end trials as the lines of stdin say, until it ends."""
        orders = b""
        self._poll.register(sys.stdin.fileno(), select.POLLIN)
        while True:
            for fd, _event in self._poll.poll():
                if fd in self._pipes:
                    self._report_end(fd)
                    continue
                received = os.read(fd, 1 << 16)
                if not received:
                    return
                *lines, orders = (orders + received).split(b"\n")
                for line in lines:
                    self._follow(*json.loads(line))

    def _follow(self, number: int, order: dict[str, Any]) -> None:
        if order:
            self._begin(number, **order)
        elif number in self._pids:
            os.kill(self._pids[number], signal.SIGKILL)

    def _begin(self, number: int, *, cpu_s: float, wall_s: float, structure: str) -> None:
        ours, its = os.pipe()
        pid = os.fork()
        if pid == 0:
            _try(self._grammars, structure, its, cpu_s=cpu_s, wall_s=wall_s)
        os.close(its)
        self._pids[number], self._pipes[ours] = pid, number
        self._poll.register(ours, 0)  # only its end

    def _report_end(self, pipe: int) -> None:
        number = self._pipes.pop(pipe)
        self._poll.unregister(pipe)
        written = os.read(pipe, _MAX_OUTCOME_BYTES)
        os.close(pipe)
        _pid, status, used = os.wait4(self._pids.pop(number), 0)
        reason, num_bytes = json.loads(written) if written else ("", 0)
        outcome = {"cpu_s": used.ru_utime + used.ru_stime, "reason": reason, "num_bytes": num_bytes}
        _send([number, outcome | {"signal_number": 0 if written else os.WTERMSIG(status) or signal.SIGABRT}])


def _try(grammars: Grammars, structure: str, pipe: int, *, cpu_s: float, wall_s: float) -> NoReturn:
    """Be a trial."""
    try:
        die_with_parent()
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # before any other process
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process, and so does the next one
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        (_size, before), reason = _memory_bytes(), ""
        try:
            kept = grammars.compile(structure)
        except InvalidRequest as error:
            kept, reason = None, error.message[:_MAX_REASON_CHARS]
        num_bytes = 0 if kept is None else max(0, _memory_bytes()[1] - before)
        os.write(pipe, json.dumps([reason, num_bytes]).encode())
    finally:
        os._exit(1)


def _memory_bytes() -> tuple[int, int]:
    """Return the size of this process's address space, and that of its memory that no file holds."""
    size, resident, shared, *_rest = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
    return size * resource.getpagesize(), (resident - shared) * resource.getpagesize()


def _send(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve trials until stdin ends."""
    die_with_parent()
    os.environ[PARENT_PID_ENV] = str(os.getpid())  # for the trials
    grammars = Grammars.described(json.loads(sys.stdin.buffer.readline()))
    with contextlib.suppress(InvalidRequest):
        grammars.compile('{"regex": "a"}')  # loads library and vocabulary before memory is limited
    size = _memory_bytes()[0] + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()  # forks share what is loaded
    _send("ready")
    _Forks(grammars).serve()


if __name__ == "__main__":
    main()
