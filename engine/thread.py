"""Runs an EngineCore on its own thread; the event loop never waits for a forward pass.

All access to the core goes through `call` (await the result) or `post` (fire and forget); both run between two steps,
in order. Events come back with one `call_soon_threadsafe` per step.

An exception of the executor fails the requests of that step. An exception of the bookkeeping means broken invariants:
the thread reports it and ends, since its later results could not be trusted. A step that never ends raises nothing:
`running_step` shows it to the watchdog of the process (worker/watchdog.py).
"""

import asyncio
import concurrent.futures
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from common.block_hash import BlockHashes
from common.clock import Clock
from common.timing import StepShape
from engine.core import EngineCore
from engine.events import StepReport
from engine.executor import Executor
from engine.interface import Engine
from engine.steps.group import Emitted
from engine.steps.landing import Pinned
from engine.steps.scheduler import SchedulerLimits
from engine.steps.speculator import Speculator

logger = logging.getLogger(__name__)

_SWITCH_S = 0.0002
"""Time after which a busy event loop lets the engine thread go on. A step asks for the interpreter lock several times:
with Python's 5 ms a device would wait."""

_MIN_IDLE_S = 1.0
"""Least time between two reports of an idle engine."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RunningStep:
    """Work that the engine has begun and not ended."""

    shapes: tuple[StepShape, ...]
    """Steps whose results may have to be waited for; none while commands run and while a step is planned."""
    started_s: float
    """On the monotonic clock."""


class EngineDriver(Protocol):
    """Steps a core and runs commands on it between two steps. Call all methods on the event loop."""

    core: Engine
    """The engine. Its methods are for commands; before `start`, for anybody."""
    running_step: RunningStep | None = None
    """None while the engine is idle. Any thread."""

    def start(self) -> None:
        """Start stepping."""
        ...

    async def aclose(self) -> None:
        """Stop after the current step."""
        ...

    def post(self, command: Callable[[Engine], object]) -> None:
        """Run `command` between two steps. One that raises is a fault of the whole engine."""
        ...

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run `command` between two steps and return its result or raise its exception."""
        ...

    async def acquire(self, command: Callable[[Engine], T], undo: Callable[[Engine, T], object]) -> T:
        """Like `call`, but when the caller is cancelled before it returns, `undo` runs on the result."""
        box: list[T] = []

        def run(core: Engine) -> T:
            box.append(command(core))
            return box[0]

        try:
            return await self.call(run)
        except asyncio.CancelledError:
            self.post(lambda core: undo(core, box[0]) if box else None)
            raise

    async def pin(self, hashes: BlockHashes) -> Pinned:
        """Hold the pages of the longest cached prefix for a puller, until `PrefixPages.unpin`.

        When the caller is cancelled before it returns, nothing is held.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Surroundings of a new engine."""

    limits: SchedulerLimits
    clock: Clock
    on_report: Callable[[StepReport], None]
    on_fault: Callable[[Exception], None]
    """Called when the engine is broken, or when events were lost. Some callers are no longer answered then: the owner
    has to end the process, or every waiting caller."""


DriverFactory = Callable[[Any, EngineSetup], EngineDriver]
"""Makes the engine of a loaded model, of the kind that the factory is for, and its driver."""


class EngineThread(EngineDriver):
    """Owner of one core and its thread. Construct and use on the event loop; `start` before, `aclose` after."""

    def __init__(
        self, core: EngineCore, on_report: Callable[[StepReport], None], on_fault: Callable[[Exception], None]
    ) -> None:
        """`on_report`, `on_fault`: see `EngineSetup`; both are called on the event loop."""
        self.core: EngineCore = core
        self._on_report = on_report
        self._on_fault = on_fault
        self._commands: queue.SimpleQueue[Callable[[EngineCore], None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @classmethod
    def of(cls, executor: Executor, setup: EngineSetup, *, speculator: Speculator | None = None) -> "EngineThread":
        """Return a thread for a new core that steps an executor; a `DriverFactory`."""
        core = EngineCore(executor, setup.limits, setup.clock, speculator)
        return cls(core, setup.on_report, setup.on_fault)

    def start(self) -> None:
        """Start stepping. From then on the process's threads give the interpreter lock back sooner."""
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        self._thread.start()

    async def aclose(self) -> None:
        """Stop after the current step and join the thread."""
        if self._thread.is_alive():
            self._commands.put(None)
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def post(self, command: Callable[[EngineCore], object]) -> None:
        """Run `command` on the engine thread between two steps. One that raises is a fault of the whole engine."""
        self._commands.put(lambda core: void(command(core)))

    async def call(self, command: Callable[[EngineCore], T]) -> T:
        """Run `command` on the engine thread between two steps and return its result or raise its exception.

        When the caller is cancelled the command runs all the same: a command that acquires something must be followed
        by a `post` that releases it (see `acquire`).
        """
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run(core: EngineCore) -> None:
            try:
                result = command(core)
            except Exception as error:  # noqa: BLE001 - handed to the caller
                done.set_exception(error)
            else:
                done.set_result(result)

        self._commands.put(run)
        return await asyncio.shield(asyncio.wrap_future(done))

    async def pin(self, hashes: BlockHashes) -> Pinned:
        """See `EngineDriver`."""
        landings = self.core.landings
        return await self.acquire(lambda _core: landings.pin(hashes), lambda _core, pinned: landings.unpin(pinned))

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        except Exception as error:  # the top of the thread
            logger.critical("the engine thread died", exc_info=True)
            try:
                self._loop.call_soon_threadsafe(self._on_fault, error)
            except RuntimeError:
                logger.debug("the event loop is closed; the fault is not reported")

    def _step_until_stopped(self) -> None:
        core = self.core
        shape = StepShape()
        while (num_commands := self._drain(core)) is not None:
            had_work = core.has_work
            if not (had_work or num_commands):
                self._send(core, [])  # of an idle engine whose load may have changed
                continue
            self.running_step = RunningStep((), time.monotonic())  # planning may draft, with a model of its own
            plan, started = core.begin_step()
            if started or (had_work and num_commands):
                self._send(core, started)  # before a step that may take long: the report includes new requests
            # With two steps in flight, the results that are due are those of the step before.
            before, shape = shape, plan.shape
            self.running_step = RunningStep((before, shape), time.monotonic())
            self._send(core, core.finish_step(plan))

    def _drain(self, core: EngineCore) -> int | None:
        """Run all queued commands, waiting for one when the core is idle, as long as nothing else changes there.

        Returns their number; None: stop.
        """
        num_commands = 0
        block, idle_s = not core.has_work, core.idle_s
        timeout_s = None if idle_s is None else max(idle_s, _MIN_IDLE_S)
        while True:
            self.running_step = None
            try:
                command = self._commands.get(block=block, timeout=timeout_s)
            except queue.Empty:
                return num_commands
            if command is None:
                return None
            self.running_step = RunningStep((), time.monotonic())
            command(core)
            core.wake()
            num_commands += 1
            block = False

    def _send(self, core: EngineCore, emitted: Emitted) -> None:
        report = core.report()
        try:
            self._loop.call_soon_threadsafe(self._dispatch, report, emitted)
        except RuntimeError:
            logger.debug("the event loop is closed; %d events are dropped", len(emitted))

    def _dispatch(self, report: StepReport, emitted: Emitted) -> None:
        try:
            self._on_report(report)
            for group, event in emitted:
                group.sink(event)
        except Exception as error:  # events are lost, so requests would wait for ever
            logger.critical("events of a step were lost", exc_info=True)
            self._on_fault(error)


def void(_result: object) -> None:
    """Drop a result."""
