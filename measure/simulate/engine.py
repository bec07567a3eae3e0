"""Steps a real engine core in virtual time, in place of the engine thread.

Commands run between two steps, as on the thread; a step takes the time that `StepTimes` says, then its results are
taken. With a `SimExecutor`, which knows the tokens beforehand, decodes are not planned one by one
(`measure/simulate/leap.py`), and tokens go out in runs (`measure/simulate/tokens.py`): neither changes what happens, or
when.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from common.block_hash import BlockHashes
from common.timing import StepShape
from engine.core import EngineCore
from engine.events import EngineLoad, StepReport, Tokens
from engine.steps.group import Emitted
from engine.steps.landing import Pinned
from engine.steps.plan import StepPlan
from engine.thread import EngineDriver, RunningStep
from measure.simulate.executor import SimExecutor
from measure.simulate.leap import DecodeLeap
from measure.simulate.loop import VirtualLoop
from measure.simulate.timing import StepTimes
from measure.simulate.tokens import KeptTokens, TokenLog

T = TypeVar("T")


class SimEngine(EngineDriver):
    """An `engine.thread.EngineDriver` on a virtual loop. All methods on the loop.

    At most one event is pending at any time, and `_timer` is set for it: the beginning or the end of a step, or a
    boundary of steps that hold nothing but decodes. Errors of steps, and of commands without a caller, go to the loop's
    exception handler.
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
        self._num_steps = 0
        self._busy_s = 0.0
        """Time of all steps that have begun."""
        self._step_ends_s = 0.0

    @property
    def num_steps(self) -> int:
        """Number of steps, up to the last change of the batch."""
        return self._num_steps + (self._leap.num_steps if self._leap is not None else 0)

    @property
    def busy_s(self) -> float:
        """Time spent in steps until now."""
        now_s = self._loop.time()
        left_s = 0.0 if self.running_step is None else self._step_ends_s - now_s
        return self._busy_s - left_s + (self._leap.busy_until(now_s) if self._leap is not None else 0.0)

    def load(self) -> EngineLoad:
        """Return the load at this moment."""
        return self._up_to_date(self.core.load())

    def _up_to_date(self, load: EngineLoad) -> EngineLoad:
        """Return a load of the core with the tokens that a leap has not applied yet."""
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
        """Stop at once. Tokens that are held back go out; nothing else is answered."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leap is not None:
            self._leap.break_off(self._loop.time())
        for group, event in self._kept.flush_all():
            group.sink(event)

    def hand_out(self) -> None:
        """Send tokens that are held back after the running step: a caller waits for the next one."""
        self.post(lambda _core: self._hand_out())

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

    async def pin(self, hashes: BlockHashes) -> Pinned:
        """Hold the pages of the longest cached prefix for a puller."""
        landings = self.core.landings
        return await self.acquire(lambda _core: landings.pin(hashes), lambda _core, pinned: landings.unpin(pinned))

    # ── between steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        """Make sure that commands run after the running step."""
        if not self._is_running:
            return
        if self._timer is None:
            self._timer = self._loop.call_soon(self._begin)
        elif self._leap is not None and self._leap.is_running:
            boundary, ends_s = self._leap.next_boundary(self._loop.time())
            if ends_s < self._wakes_at_s:
                self._timer.cancel()
                self._set_boundary(self._leap, boundary, ends_s)

    def _run_commands(self) -> None:
        """Run all pending commands."""
        core, commands = self.core, self._commands
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

    def _hand_out(self) -> None:
        if self._leap is not None:
            self._leap.leave()
        for group, event in self._kept.flush_all():
            group.sink(event)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        """Run commands, then plan the next steps and let their time pass."""
        self._timer = None
        self._run_commands()
        core, leap = self.core, self._leap
        core.wake()  # something has happened: waiting requests may fit now
        num_decodes = 0 if leap is None else leap.gather(self._loop.time())
        self._plan(leap if num_decodes else None)
        self._report()

    def _plan(self, leap: DecodeLeap | None) -> None:
        """Plan a step beside the decodes of a leap, and let its time pass."""
        core = self.core
        plan, emitted = core.begin_step()
        if plan.batch:
            shape = plan.shape
            self.running_step = RunningStep((shape,), self._loop.time())
            seconds = self._seconds(shape)
            self._num_steps += 1
            self._busy_s += seconds
            self._step_ends_s = self._loop.time() + seconds
            if leap is not None:
                leap.step(seconds)
            self._timer = self._loop.call_later(seconds, self._end, leap, plan)
        else:
            emitted += core.finish_step(plan)
            if leap is not None:
                self._set_boundary(leap, *leap.run())
            elif core.has_work:  # results of the last steps in flight have brought work
                self._timer = self._loop.call_soon(self._begin)
        self._dispatch(emitted)

    def _end(self, leap: DecodeLeap | None, plan: StepPlan) -> None:
        """Take the results of a step, and begin the next one."""
        self.running_step = None
        if leap is not None:
            self._dispatch(leap.complete_step(self._loop.time()))
        self._dispatch(self.core.finish_step(plan))
        self._begin()

    def _set_boundary(self, leap: DecodeLeap, boundary: int, at_s: float) -> None:
        self._wakes_at_s = at_s
        self._timer = self._loop.call_at(at_s, self._reach, leap, boundary)

    def _reach(self, leap: DecodeLeap, boundary: int) -> None:
        """Continue at a boundary of steps that hold nothing but decodes."""
        self._dispatch(leap.complete(boundary, self._loop.time()))
        self._begin()

    def _seconds(self, shape: StepShape) -> float:
        if shape.num_prefill_tokens:
            return self._times.step_s(shape)
        constant_s, per_context_token_s = self._times.decode_line(shape.num_decodes)
        return constant_s + shape.num_context_tokens * per_context_token_s

    # ── reports ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _report(self) -> None:
        """Report load and cache to the worker."""
        report = self.core.report()
        if self._leap is not None:
            samples = report.samples + self._leap.drain_samples()
            report = replace(report, load=self._up_to_date(report.load), samples=samples)
        self._on_report(report)

    def _dispatch(self, emitted: Emitted) -> None:
        """Hand events to their requests."""
        now_s = self._loop.time()
        for group, event in emitted:
            if isinstance(event, Tokens):
                for output in event.tokens:
                    if output.sample_index == 0:
                        self._log.note(group.request.request_id, output.token_index, (now_s,))
            for due in [event] if self._leap is None else self._kept.take(group, event):
                group.sink(due)
