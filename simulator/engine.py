"""Steps a real engine core in virtual time, in place of the engine thread.

Commands run between two steps, as there; a step takes the time that `StepTimes` says, then its results are taken.
Tokens behind a request's first ones are kept back and go out as one run, with the last one at the latest: what is
reported about their times comes from the token log, to which every one is told when it comes.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from common.timing import StepShape
from engine.core import Emitted, EngineCore
from engine.events import EngineEvent, Failed, FinishReason, StepReport, TokenRun, Tokens
from engine.group import Group
from engine.scheduler import StepPlan
from simulator.loop import VirtualLoop
from simulator.timing import StepTimes
from simulator.token_log import TokenLog

T = TypeVar("T")


class SimEngine:
    """An `engine.thread.EngineDriver` on a virtual loop. All methods on the loop."""

    def __init__(
        self,
        core: EngineCore,
        on_report: Callable[[StepReport], None],
        *,
        loop: VirtualLoop,
        times: StepTimes,
        log: TokenLog,
    ) -> None:
        """What a step or a command without a caller raises goes to the loop's exception handler."""
        self.core = core
        self.num_steps = 0
        self.busy_s = 0.0
        self._loop = loop
        self._times = times
        self._on_report = on_report
        self._log = log
        self._commands: deque[tuple[Callable[[EngineCore], Any], asyncio.Future[Any] | None]] = deque()
        self._kept = _KeptTokens()
        self._timer: asyncio.Handle | None = None
        """Of the end of the running step, or of the beginning of the next one."""
        self._is_running = False

    # ── the driver ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start stepping."""
        self._is_running = True
        self._wake()

    async def aclose(self) -> None:
        """Stop."""
        self.stop()

    def stop(self) -> None:
        """Stop at once; nothing is answered any more."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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

    # ── stepping ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        if self._is_running and self._timer is None:
            self._timer = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Run commands, then plan a step and let its time pass."""
        self._timer = None
        core = self._core_after_commands()
        emitted = core.begin_step() if core.has_work else []
        plan = core.plan
        if plan.batch:
            seconds = self._times.step_s(shape_of(plan))
            self.num_steps += 1
            self.busy_s += seconds
            self._timer = self._loop.call_later(seconds, self._end)
            self._send(emitted)
        else:
            self._send(emitted + core.finish_step())

    def _end(self) -> None:
        """Take the results of the step, and begin the next one."""
        self._send(self.core.finish_step())
        self._begin()

    def _core_after_commands(self) -> EngineCore:
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
            core.wake()
        return core

    def _send(self, emitted: Emitted) -> None:
        core = self.core
        self._on_report(StepReport(kv_events=core.pool.drain_events(), load=core.load()))
        now_s = self._loop.time()
        for group, event in emitted:
            if isinstance(event, Tokens):
                for output in event.tokens:
                    if output.sample_index == 0:
                        self._log.note(group.request.request_id, output.token_index, now_s)
            for due in self._kept.take(group, event):
                group.sink(due)


class _KeptTokens:
    """Tokens that wait for more of their request, to go out as one run."""

    def __init__(self) -> None:
        self._runs: dict[Group, tuple[int, array[int]]] = {}

    def take(self, group: Group, event: EngineEvent) -> list[EngineEvent]:
        """Return what is to go out now."""
        if not isinstance(event, Tokens) or group.request.sampling.detokenize or len(group.sequences) != 1:
            if isinstance(event, Failed):
                self._runs.pop(group, None)
            return [event]
        (output,) = event.tokens
        kept = self._runs.get(group)
        if event.prefill_s is not None:  # behind kept ones only when the prompt was computed again
            return [event] if kept is None else [self.flush(group, None), event]
        if kept is None:
            kept = self._runs[group] = output.token_index, array("I")
        kept[1].append(output.token_id)
        if output.finish_reason is None:
            return []
        return [self.flush(group, output.finish_reason)]

    def flush(self, group: Group, finish_reason: FinishReason | None) -> Tokens:
        """Return a group's run."""
        first_index, token_ids = self._runs.pop(group)
        run = TokenRun(
            sample_index=group.leader.sample_index,
            first_token_index=first_index,
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
        )
        return Tokens(runs=(run,))


def shape_of(plan: StepPlan) -> StepShape:
    """Return what is in a step."""
    num_prefill_tokens = num_prefill_pairs = num_decodes = num_context_tokens = 0
    for sequence, item in plan.batch.items():
        if item.num_new_tokens == 1 and item.num_samples:
            num_decodes += 1
            num_context_tokens += sequence.num_computed + 1
        else:
            num_new = item.num_new_tokens
            num_prefill_tokens += num_new
            num_prefill_pairs += num_new * sequence.num_computed + num_new * (num_new + 1) // 2
    return StepShape(
        num_prefill_tokens=num_prefill_tokens,
        num_prefill_pairs=num_prefill_pairs,
        num_decodes=num_decodes,
        num_context_tokens=num_context_tokens,
    )
