"""Steps a real engine core in virtual time, in place of the engine thread.

Commands run between two steps, as there; a step takes the time that `StepTimes` says, then its results are taken. With
a `SimExecutor`, which knows the tokens beforehand, steps of a batch that only decodes are not taken one by one
(`simulator/leap.py`), and tokens go out in runs (`simulator/bundle.py`): neither changes what happens, or when.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from common.timing import StepShape
from engine.core import Emitted, EngineCore
from engine.events import Load, StepReport, Tokens
from simulator.bundle import KeptTokens
from simulator.executor import SimExecutor
from simulator.leap import DecodeLeap
from simulator.loop import VirtualLoop
from simulator.timing import StepTimes
from simulator.token_log import TokenLog

T = TypeVar("T")


class SimEngine:
    """An `engine.thread.EngineDriver` on a virtual loop. All methods on the loop.

    Three things may be pending, and `_timer` is set for it: the beginning of a step, the end of one, or a boundary of a
    leap. What a step or a command without a caller raises goes to the loop's exception handler.
    """

    def __init__(
        self,
        core: EngineCore,
        on_report: Callable[[StepReport], None],
        *,
        loop: VirtualLoop,
        times: StepTimes,
        log: TokenLog,
    ) -> None:
        self.core = core
        self._on_report = on_report
        self._loop = loop
        self._times = times
        self._log = log
        self._commands: deque[tuple[Callable[[EngineCore], Any], asyncio.Future[Any] | None]] = deque()
        self._kept = KeptTokens()
        self._leap = DecodeLeap(core, times, log, self._kept) if isinstance(core.executor, SimExecutor) else None
        self._timer: asyncio.Handle | None = None
        self._wakes_at_s = 0.0
        self._is_running = False
        self._is_steady = False
        """The last step changed nothing that a waiting sequence could wait for."""
        self._num_steps = 0
        self._busy_s = 0.0

    @property
    def num_steps(self) -> int:
        """Steps taken, up to the last change of the batch."""
        return self._num_steps + (self._leap.num_steps if self._leap is not None else 0)

    @property
    def busy_s(self) -> float:
        """The time that they took."""
        return self._busy_s + (self._leap.busy_s if self._leap is not None else 0.0)

    def load(self) -> Load:
        """Return the load at this moment."""
        load = self.core.load()
        num_behind = 0 if self._leap is None else self._leap.num_tokens_behind(self._loop.time())
        return replace(load, num_context_tokens=load.num_context_tokens + num_behind) if num_behind else load

    # ── the driver ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start stepping."""
        self._is_running = True
        self._wake()

    async def aclose(self) -> None:
        """Stop at once."""
        self.stop()

    def stop(self) -> None:
        """Stop at once; nothing is answered any more. Tokens kept back that exist by now go out."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leap is not None and self._leap.is_active:
            self._leap.break_off(self._loop.time())
        for group, event in self._kept.flush_all():
            group.sink(event)

    def post(self, command: Callable[[EngineCore], object]) -> None:
        """Run `command` between two steps."""
        self._commands.append((command, None))
        self._wake()

    async def call(self, command: Callable[[EngineCore], T]) -> T:
        """Run `command` between two steps and return its result or raise its exception."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._commands.append((command, done))
        self._wake()
        return await done

    async def acquire(self, command: Callable[[EngineCore], T], undo: Callable[[EngineCore, T], object]) -> T:
        """Like `call`, but when the caller is cancelled meanwhile, `undo` is run on the result."""
        box: list[T] = []

        def run(core: EngineCore) -> T:
            box.append(command(core))
            return box[0]

        try:
            return await self.call(run)
        except asyncio.CancelledError:
            self.post(lambda core: undo(core, box[0]) if box else None)
            raise

    # ── between steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        """See to it that commands run when the running step is over."""
        if not self._is_running:
            return
        if self._timer is None:
            self._timer = self._loop.call_soon(self._begin)
        elif self._leap is not None and self._leap.is_active:
            boundary, ends_s = self._leap.next_boundary(self._loop.time())
            if ends_s < self._wakes_at_s:
                self._timer.cancel()
                self._set_boundary(boundary, ends_s)

    def _run_commands(self) -> int:
        """Run what was asked for; return how many there were."""
        core, commands = self.core, self._commands
        num_commands = len(commands)
        while commands:
            command, done = commands.popleft()
            try:
                result = command(core)
            except Exception as error:
                if done is None:
                    raise
                if not done.done():
                    done.set_exception(error)
            else:
                if done is not None and not done.done():
                    done.set_result(result)
            core.wake()
        return num_commands

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        """Run commands, then plan a step and let its time pass."""
        core, leap = self.core, self._leap
        num_commands = self._run_commands()
        if leap is not None:
            may_leap = not core.scheduler.waiting or (self._is_steady and num_commands == 0)
            if may_leap and leap.enter(self._loop.time()):
                self._report()
                self._set_boundary(*leap.next_due())
                return
        num_preemptions = core.scheduler.num_preemptions
        emitted = core.begin_step() if core.has_work else []
        plan = core.plan
        if not plan.batch:
            self._dispatch(emitted + core.finish_step())
            self._report()
            self._timer = None
            return
        # A plan that preempts does not look at those who wait.
        self._is_steady = not (plan.admitted or plan.is_short or core.scheduler.num_preemptions > num_preemptions)
        seconds = self._seconds(plan.shape)
        self._num_steps += 1
        self._busy_s += seconds
        self._timer = self._loop.call_later(seconds, self._end)
        self._dispatch(emitted)
        self._report()

    def _end(self) -> None:
        """Take the results of the step, and begin the next one."""
        core = self.core
        before = core.scheduler.running[:]
        emitted = core.finish_step()
        self._dispatch(emitted)
        has_published = self._report()
        self._is_steady &= not has_published and before == core.scheduler.running
        self._begin()

    def _seconds(self, shape: StepShape) -> float:
        if shape.num_prefill_tokens:
            return self._times.step_s(shape)
        constant_s, per_context_token_s = self._times.decode_line(shape.num_decodes)
        return constant_s + shape.num_context_tokens * per_context_token_s

    # ── many steps ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _set_boundary(self, boundary: int, at_s: float) -> None:
        self._wakes_at_s = at_s
        self._timer = self._loop.call_at(at_s, self._reach, boundary)

    def _reach(self, boundary: int) -> None:
        """Handle a boundary of a leap: what happens to its sequences, then commands, then go on."""
        leap = self._leap
        assert leap is not None, "a boundary without a leap"
        self._dispatch(leap.complete(boundary, self._loop.time()))
        self._run_commands()
        if leap.go_on():
            self._set_boundary(*leap.next_due())
            self._report()
        else:
            self._is_steady = False
            self._begin()

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _report(self) -> bool:
        """Tell the worker of load and cache; return whether the cache has changed."""
        kv_events = self.core.pool.drain_events()
        samples = self.core.drain_samples()
        if self._leap is not None:
            samples += self._leap.drain_samples()
        accepted = self.core.drain_accepted()
        self._on_report(StepReport(kv_events=kv_events, load=self.load(), samples=samples, accepted=accepted))
        return bool(kv_events)

    def _dispatch(self, emitted: Emitted) -> None:
        """Hand events to their requests."""
        now_s = self._loop.time()
        for group, event in emitted:
            if isinstance(event, Tokens):
                for output in event.tokens:
                    if output.sample_index == 0:
                        self._log.note(group.request.request_id, output.token_index, now_s)
            for due in [event] if self._leap is None else self._kept.take(group, event):
                group.sink(due)
