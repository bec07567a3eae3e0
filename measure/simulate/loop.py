"""An asyncio event loop with virtual time: it never sleeps, and an hour passes as fast as it can be computed.

Ready callbacks run in the order in which they became ready; when there are none, time jumps to the next timer. Timers
of equal time fire in the order in which they were set. A run therefore depends on nothing but its input.

A callback belongs to the process that its context names (`PROCESS`); tasks, timers and callbacks inherit it. A process
can be stopped as by SIGSTOP: none of its callbacks runs until it is continued, then all that were due do, in order.
"""

import asyncio
import gc
import heapq
from asyncio.events import Handle, TimerHandle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVarTuple

_Ts = TypeVarTuple("_Ts")

PROCESS: ContextVar[str] = ContextVar("process", default="")
"""Name of the simulated process to which a callback belongs."""
_MIN_CANCELLED_TIMERS = 1000
"""Cancelled timers are swept out of the heap when there are more than this, and more than half of it."""


class Deadlock(RuntimeError):
    """All tasks wait and no timer is set."""


class _Callback(Handle):
    """A handle without the debug information that slows down the base class."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: Any, loop: "VirtualLoop", context: Context | None
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._source_traceback = self._repr = None


class _Timer(TimerHandle):
    """A timer, made likewise, that knows whether it is in the heap."""

    __slots__ = ("is_set",)

    def __init__(
        self, when: float, callback: Callable[..., object], args: Any, loop: "VirtualLoop", context: Context | None
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._scheduled = False
        self._source_traceback = self._repr = None
        self.is_set = True


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks on one thread in virtual time, which starts at 0. Has no sockets, subprocesses or threads.

    `run_in_executor` runs the function at once, on the loop's thread. Raises Deadlock from `run_forever` and
    `run_until_complete` when no callback is ready and no timer is set.
    """

    is_virtual = True
    """See `common.clock.turn_time_s`."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._num_timers_set = 0
        self._num_timers_cancelled = 0
        self._timers: list[tuple[float, int, _Timer]] = []
        self._held: dict[str, list[Handle]] = {}
        """Callbacks of stopped processes that are due, by process."""
        self._ready: Any  # deque[Handle], made by the base class

    @property
    def num_timers(self) -> int:
        """Timers in the heap, including cancelled ones."""
        return len(self._timers)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._now_s

    def stop_process(self, process: str) -> None:
        """Hold back all callbacks of a process."""
        self._held.setdefault(process, [])

    def continue_process(self, process: str) -> None:
        """Run what was held back, and hold back nothing more. Harmless for a process that was not stopped."""
        self._ready.extend(self._held.pop(process, ()))

    def is_stopped(self, process: str) -> bool:
        """Return whether a process is stopped."""
        return process in self._held

    def call_soon(self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None) -> Handle:
        """Run `callback` after all callbacks that are ready now."""
        handle = _Callback(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> Handle:
        """Like `call_soon`: there is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> TimerHandle:
        """Run `callback` at time `when`, or at once when it has passed."""
        timer = _Timer(when, callback, args, self, context)
        self._num_timers_set += 1
        heapq.heappush(self._timers, (when, self._num_timers_set, timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> TimerHandle:
        """Run `callback` after `delay` seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Run `func` now and return a future that is done."""
        done = self.create_future()
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            done.set_exception(error)
        else:
            done.set_result(result)
        return done

    def _timer_handle_cancelled(self, timer: TimerHandle) -> None:
        if not (isinstance(timer, _Timer) and timer.is_set):
            return  # it has left the heap
        self._num_timers_cancelled += 1
        if self._num_timers_cancelled > max(_MIN_CANCELLED_TIMERS, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._num_timers_cancelled = 0

    def _run_once(self) -> None:
        ready = self._ready
        if not ready:
            self._jump()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:  # noqa: SLF001
                continue
            if self._held and (held := self._held.get(handle._context.get(PROCESS, ""))) is not None:  # noqa: SLF001
                held.append(handle)
            else:
                handle._run()  # noqa: SLF001

    def _jump(self) -> None:
        """Advance to the time of the next timer and make all timers of that time ready."""
        timers = self._timers
        while timers:
            when = self._take_timer()
            if when is None:
                continue
            self._now_s = max(self._now_s, when)
            while timers and timers[0][0] <= when:
                self._take_timer()
            return
        if not self._stopping:  # type: ignore[attr-defined]
            raise Deadlock(f"at {self._now_s:.6f} s no task can go on and no timer is set")

    def _take_timer(self) -> float | None:
        """Make the first timer of the heap ready and return its time, or drop a cancelled one and return None."""
        when, _number, timer = heapq.heappop(self._timers)
        timer.is_set = False
        if timer._cancelled:  # noqa: SLF001
            self._num_timers_cancelled -= 1
            return None
        self._ready.append(timer)
        return when

    def _write_to_self(self) -> None:
        """Do nothing: the loop never waits."""

    def _process_events(self, _events: object) -> None:
        """Do nothing: there are no events."""


class VirtualClock:
    """A `common.clock.Clock` that reads a virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.monotonic = loop.time


@contextmanager
def ending_on_faults(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Cancel the running task when a callback, such as an engine's step, raises, and raise its error from the block.

    asyncio alone would log the error and go on.
    """
    faults: list[BaseException] = []
    task = asyncio.current_task()
    assert task is not None, "a simulation runs in a task"

    def take(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        faults.append(context.get("exception") or RuntimeError(context["message"]))
        task.cancel()

    loop.set_exception_handler(take)
    try:
        yield
    except asyncio.CancelledError:
        if not faults:
            raise
    if faults:
        raise faults[0]


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Run the garbage collector less often, and hardly ever over old objects: small ones come by the million."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
