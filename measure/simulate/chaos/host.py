"""The place of one worker: its process, which dies and is started again, and the faults that befall it."""

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from common.ids import Epoch, RequestId
from common.timing import StepModel, StepShape, TimingModel
from common.watchdog import TICK_S, Watchdog
from engine.events import Tokens
from engine.fake import FakeExecutor
from engine.steps.group import Emitted, Group
from engine.steps.plan import StepPlan
from kv_tiers.tiers import Tiers
from kvrelay.v1 import worker_pb2
from measure.simulate.chaos.poison import PoisonBook
from measure.simulate.engine import SimEngine
from measure.simulate.leap import DecodeLeap
from measure.simulate.loop import PROCESS, VirtualClock
from measure.simulate.timing import FittedTimes, WorkerSpeed
from measure.simulate.wire import KEEPALIVE_S
from measure.simulate.worker import SharedWorld, SimWorker
from router.fleet.facts import WorkerEndpoint
from worker.step_watch import predict_s, step_watch_of

TIMES = TimingModel(
    prefill=StepModel(constant_s=4e-3, per_prefill_token_s=2e-4),
    decode=StepModel(constant_s=4e-3, per_decode_s=1e-4),
    max_step_tokens=32,
)


class _Times(FittedTimes):
    """Step times of a worker that may be slow for a while."""

    factor = 1.0

    def step_s(self, shape: StepShape) -> float:
        return self.factor * super().step_s(shape)

    def decode_line(self, num_decodes: int) -> tuple[float, float]:
        constant_s, per_context_token_s = super().decode_line(num_decodes)
        return self.factor * constant_s, self.factor * per_context_token_s


class _Engine(SimEngine):
    """An engine whose step may end the process, or never end."""

    may_end: Callable[[StepPlan], bool]
    """Returns, at the end of each step, whether the engine goes on; after False nothing happens any more."""
    on_tokens: Callable[[Group, Tokens], None]
    """Receives all tokens."""

    def _end(self, leap: DecodeLeap | None, plan: StepPlan) -> None:
        if self.may_end(plan):
            super()._end(leap, plan)

    def _dispatch(self, emitted: Emitted) -> None:
        for group, event in emitted:
            if isinstance(event, Tokens):
                self.on_tokens(group, event)
        super()._dispatch(emitted)


class Host:
    """One worker's place. Event loop only."""

    worker: SimWorker
    """The present life, or the last one."""

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        world: SharedWorld,
        make_model: Callable[[], tuple[FakeExecutor, Tiers | None]],
        poisons: PoisonBook,
        *,
        draw_down_s: Callable[[], float],
        on_tokens: Callable[[Epoch, Group, Tokens], None],
    ) -> None:
        """`draw_down_s` returns the time after which a dead process is started again.

        `on_tokens` is called with all tokens that a life generates.
        """
        self.endpoint = endpoint
        self._world = world
        self._loop = world.loop
        self._make_model = make_model
        self._poisons = poisons
        self._draw_down_s = draw_down_s
        self._on_tokens = on_tokens
        self._context = copy_context()
        """Context of everything that is not the process."""
        self._is_down = True
        self._is_to_hang = self._is_hung = False
        self._times = _Times(TIMES)
        self._watching: asyncio.Task[None] | None = None
        self._dying: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Address at which the worker serves."""
        return self.endpoint.address

    @property
    def is_decode(self) -> bool:
        """Whether the worker can serve requests alone."""
        return self.endpoint.role == worker_pb2.WORKER_ROLE_DECODE

    @property
    def is_well(self) -> bool:
        """Whether no fault concerns the process now."""
        is_ill = self._is_down or self._is_to_hang or self._is_hung or self._times.factor > 1
        return not (is_ill or self._loop.is_stopped(self._name))

    @property
    def _name(self) -> str:
        return self.endpoint.worker_id

    @property
    def _watchdog_name(self) -> str:
        return f"{self._name}/watchdog"

    def start(self) -> None:
        """Start a process, with an empty cache and a new epoch, unless one lives."""
        if not self._is_down:
            return
        self._is_down = self._is_to_hang = self._is_hung = False
        self._times = _Times(TIMES)
        process = self._in_process(self._name)
        self.worker = process.run(self._make_worker)
        process.run(self.worker.start)
        watching = self._watch(self.worker, process)
        self._watching = self._loop.create_task(watching, context=self._in_process(self._watchdog_name))

    def _in_process(self, name: str) -> Context:
        context = self._context.copy()
        context.run(PROCESS.set, name)
        return context

    def _make_worker(self) -> SimWorker:
        pace = WorkerSpeed(times=self._times)
        executor, tiers = self._make_model()
        return SimWorker(
            self.endpoint,
            self._world,
            executor,
            pace,
            tiers=() if tiers is None else tiers,
            make_engine=self._make_engine,
        )

    def _make_engine(self, *arguments: Any, **options: Any) -> SimEngine:
        engine = _Engine(*arguments, **options)
        engine.may_end = self._may_end
        engine.on_tokens = lambda group, tokens: self._on_tokens(self.worker.runtime.epoch, group, tokens)
        return engine

    def _may_end(self, plan: StepPlan) -> bool:
        """Return whether a step ends; if not, the process dies or hangs in it."""
        if (cause := self._poisons.strikes(plan.batch.values())) is not None:
            self.die(cause)
            return False
        step = self.worker.engine.running_step
        # A step of a kind that was never measured would go on for two minutes; see the watchdog.
        if self._is_to_hang and step is not None and predict_s(step, self.worker.runtime.timing.model) is not None:
            self._is_to_hang, self._is_hung = False, True
            self._poisons.note_death(self._name, None)
        return not self._is_hung

    async def _watch(self, worker: SimWorker, process: Context) -> None:
        watchdog = Watchdog(
            call_loop=lambda turn: self._loop.call_soon(turn, context=process),
            waited_s=lambda: 0.0,
            end=lambda _reason: self.die(),
            clock=VirtualClock(self._loop),
            looks=[step_watch_of(worker.runtime).look],
        )
        while True:
            await asyncio.sleep(TICK_S)
            watchdog.check()

    # Faults.

    def die(self, cause: RequestId | None = None) -> None:
        """Let the process die, by a request or otherwise, and start another one later. Harmless when there is none."""
        task = self._loop.create_task(self._die(cause), context=self._context.copy())
        self._dying.add(task)
        task.add_done_callback(self._dying.discard)

    async def _die(self, cause: RequestId | None) -> None:
        if self._is_down:
            return
        self._poisons.note_death(self._name, cause)
        self._is_down = True
        await self._end_watch()
        await self.worker.crash()
        self._loop.call_later(self._draw_down_s(), self.start, context=self._context)

    async def stop_for(self, seconds: float) -> None:
        """Stop the process for a while, as SIGSTOP does. Peers give up its connections when it takes too long."""
        worker, processes = self.worker, (self._name, self._watchdog_name)
        for process in processes:
            self._loop.stop_process(process)
        try:
            while seconds > KEEPALIVE_S:
                await asyncio.sleep(KEEPALIVE_S)
                seconds -= KEEPALIVE_S
                if worker is self.worker:
                    self._world.network.break_off(self.address)
            await asyncio.sleep(seconds)
        finally:
            if worker is self.worker:
                for process in processes:
                    self._loop.continue_process(process)

    def hang_loop(self) -> None:
        """Let the event loop stand still until the watchdog ends the process."""
        self._loop.stop_process(self._name)

    def hang_step(self) -> None:
        """Let the next step of a measured kind never end."""
        self._is_to_hang = True

    def spare(self) -> None:
        """Take back a hang that has not begun."""
        self._is_to_hang = False

    async def slow_for(self, seconds: float, *, factor: float) -> None:
        """Let steps take longer for a while."""
        times = self._times
        times.factor = factor
        try:
            await asyncio.sleep(seconds)
        finally:
            times.factor = 1.0

    # The end.

    async def _end_watch(self) -> None:
        if self._watching is not None:
            self._loop.continue_process(self._watchdog_name)
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._watching = None

    async def aclose(self) -> None:
        """Close the worker in an orderly way, even one that should not be stopped any more."""
        self._loop.continue_process(self._name)
        await self._end_watch()
        if self._dying:
            await asyncio.wait(self._dying)
        await self.worker.aclose()
