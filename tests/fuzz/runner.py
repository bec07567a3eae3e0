"""Tries inputs of one target, and says what is wrong with one."""

import gc
import logging
import re
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.fuzz.target import Target
from tests.fuzz.world import World

MAX_LOOP_S = 0.05
"""CPU time of the event loop that one input may take, beside what each engine step that it brings about may."""
_LOOP_S_PER_STEP = 0.002
"""A step brings up to twelve tokens, each through worker, router and client, and often the next sequence."""
_MAX_CPU_S = 10.0
"""CPU time after which an input is taken to run for ever."""
_INPUTS_PER_WORLD = 2_000
_INPUTS_PER_COLLECTION = 200
_NUM_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that may not be."""

    kind: str
    """"status", "hang", "held", "fault", "log", "slow", "protocol" or "raised"."""
    text: str

    @property
    def signature(self) -> str:
        """Key that findings of one cause share."""
        return f"{self.kind} {re.sub(r'0x[0-9a-f]+|[0-9]+', 'N', self.text.splitlines()[0])[:160]}"

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Runner:
    """Tries one input after the other on a world, which is made anew now and then. Main thread only."""

    def __init__(self, target: Target, *, max_loop_s: float = MAX_LOOP_S) -> None:
        self.target = target
        self.max_loop_s = max_loop_s
        self.last_loop_s = 0.0
        """CPU time of the event loop for the last input."""
        self._world: World | None = None
        self._num_inputs = 0
        self._log = _ErrorLog()

    @contextmanager
    def running(self) -> Iterator["Runner"]:
        """Take over the process's log, its garbage collector and SIGVTALRM for the duration of the block."""
        root = logging.getLogger()
        handlers, root.handlers = root.handlers, [self._log]
        before = signal.signal(signal.SIGVTALRM, _raise_stuck)
        gc.disable()  # collected between two inputs, since its pauses are not the input's fault
        try:
            yield self
        finally:
            gc.enable()
            signal.signal(signal.SIGVTALRM, before)
            root.handlers = handlers
            self._renew()

    def try_input(self, data: bytes) -> list[Finding]:
        """Return what is wrong with an input; nothing, if all is well."""
        if self._world is None or self._num_inputs >= _INPUTS_PER_WORLD:
            self._renew()
            self._world, self._num_inputs = World(), 0
            self._log.texts.clear()
        self._num_inputs += 1
        if self._num_inputs % _INPUTS_PER_COLLECTION == 0:
            gc.collect()
        wrong = self._play(self._world, data)
        if wrong:
            self._renew()
        parts = (each.partition(":") for each in wrong)
        return [Finding(kind=kind, text=text.strip()) for kind, _, text in parts]

    def try_again(self, data: bytes) -> list[Finding]:
        """Return what is wrong with an input every time, on a new world first."""
        tries: list[dict[str, Finding]] = []
        for _ in range(_NUM_TRIES):
            self._renew()
            tries.append({finding.signature: finding for finding in self.try_input(data)})
        return [finding for signature, finding in tries[-1].items() if all(signature in each for each in tries)]

    def _renew(self) -> None:
        """Drop the world; the next input gets a new one."""
        world, self._world = self._world, None
        if world is not None:
            with suppress(Exception):  # it may be what is broken
                world.close()

    def _play(self, world: World, data: bytes) -> list[str]:
        loop, wrong = world.loop, []
        try:
            plan = self.target.prepare(world, data)
            started_s, elsewhere_s, num_steps = time.thread_time(), loop.elsewhere_s, world.num_steps
            with _cpu_limit(_MAX_CPU_S):
                wrong += world.run(self.target.play(world, plan))
            self.last_loop_s = time.thread_time() - started_s - (loop.elsewhere_s - elsewhere_s)
            if self.last_loop_s > self.max_loop_s + _LOOP_S_PER_STEP * (world.num_steps - num_steps):
                wrong.append(f"slow: {self.last_loop_s * 1e3:.0f} ms of the event loop")
            with _cpu_limit(_MAX_CPU_S):
                world.run(self.target.restore(world))
                wrong += [f"held: {each}" for each in world.run(world.left())]
        except _Stuck as error:
            wrong.append(f"hang: {_MAX_CPU_S:g} s of CPU time, {describe(error)}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is found
            wrong.append(f"raised: {describe(error)}")
        wrong += [f"fault: {describe(each)}" for each in loop.take_faults()]
        texts, self._log.texts = self._log.texts, []
        return wrong + texts


class _Stuck(BaseException):
    """An input has used all of its CPU time. Not an Exception: what is tried must not catch it."""


def _raise_stuck(_signal: int, _frame: object) -> None:
    raise _Stuck


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


class _ErrorLog(logging.Handler):
    """Keeps logged exceptions: where our code logs one, it did not expect it."""

    def __init__(self) -> None:
        super().__init__(level=logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record that tells of an exception."""
        if record.exc_info and record.exc_info[1] is not None:
            self.texts.append(f"log: {record.getMessage()}: {describe(record.exc_info[1])}")


def describe(error: BaseException) -> str:
    """Return an exception in one line with the place that it comes from, and its traceback behind that."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{where}: {error}\n" + "".join(traceback.format_exception(error))
