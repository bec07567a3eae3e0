"""EngineThread: commands between steps, cancelled callers, and the end of the thread after a fault."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from common.clock import SystemClock
from common.errors import PromptTooLong, Refused
from engine.cache_marks import CacheMark, CacheMarks
from engine.core import EngineCore
from engine.events import EngineEvent, Failed, Started, Tokens
from engine.executor import ScheduledSequence, StepHandle, StepResult
from engine.interface import Engine
from engine.steps.group import Emitted, Group
from engine.steps.plan import StepPlan
from engine.thread import EngineThread, RunningStep
from tests.builders import Collector, assert_empty, expected_tokens, make_core, make_request
from tests.engine.overlap import Handle, Spy


@asynccontextmanager
async def running(core: EngineCore, on_fault: Callable[[Exception], None]) -> AsyncIterator[EngineThread]:
    thread = EngineThread(core, lambda _report: None, on_fault)
    thread.start()
    try:
        yield thread
    finally:
        await thread.aclose()


def unexpected(error: Exception) -> None:
    raise AssertionError("the thread must not die") from error


def reserve(core: Engine) -> Group | Refused:
    return core.reserve(make_request(range(9)), Collector())


def cancel(core: Engine, group: Group | Refused) -> None:
    assert isinstance(group, Group)
    core.cancel(group)


async def test_thread_when_bookkeeping_raises_ends_and_reports_the_fault() -> None:
    faults: asyncio.Queue[Exception] = asyncio.Queue()
    core = make_core()

    def broken() -> None:
        raise AssertionError("block 3: ref_cnt -1")

    core.begin_step = broken  # type: ignore[method-assign,assignment]
    async with running(core, faults.put_nowait) as thread:
        await thread.call(lambda core: core.add(make_request([1]), Collector()))
        async with asyncio.timeout(60):
            fault = await faults.get()
    assert str(fault) == "block 3: ref_cnt -1"


async def test_idle_engine_tells_that_its_pins_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.thread._MIN_IDLE_S", 0.001)
    core, told = make_core(clock=SystemClock()), asyncio.Queue[Mapping[str, int]]()
    marks = CacheMarks(tenant="a", max_blocks=9, marks=(CacheMark(num_blocks=2, ttl_s=0.05),))
    request = replace(make_request(range(1, 10), max_tokens=1), cache_marks=marks)
    thread = EngineThread(core, lambda report: told.put_nowait(report.load.tenant_pins), unexpected)
    thread.start()
    try:
        await thread.call(lambda core: core.add(request, Collector()))
        async with asyncio.timeout(60):
            while await told.get() != {"a": 2}:
                pass
            while await told.get() != {}:
                pass
    finally:
        await thread.aclose()


async def test_event_that_cannot_be_handed_over_is_a_fault() -> None:
    faults: asyncio.Queue[Exception] = asyncio.Queue()

    def broken(_event: EngineEvent) -> None:
        raise MemoryError

    async with running(make_core(), faults.put_nowait) as thread:
        await thread.call(lambda core: core.add(make_request([1], max_tokens=1), broken))
        async with asyncio.timeout(60):
            assert isinstance(await faults.get(), MemoryError)


async def test_call_when_command_raises_raises_in_the_caller_and_the_thread_lives() -> None:
    async with running(make_core(), unexpected) as thread:
        with pytest.raises(PromptTooLong):
            await thread.call(lambda core: core.add(make_request([1] * 600), Collector()))
        assert (await thread.call(lambda core: core.load())).num_waiting == 0


@pytest.mark.parametrize("num_turns_before_cancel", range(4))
async def test_acquire_cancelled_at_any_turn_releases_what_was_acquired(num_turns_before_cancel: int) -> None:
    core = make_core()
    async with running(core, unexpected) as thread:
        acquiring = asyncio.ensure_future(thread.acquire(reserve, cancel))
        for _ in range(num_turns_before_cancel):
            await asyncio.sleep(0)
        acquiring.cancel()
        try:
            group = await acquiring
        except asyncio.CancelledError:
            pass
        else:
            await thread.call(lambda core: cancel(core, group))
        await thread.call(assert_empty)


class Gate:
    """Keeps a core's steps from ending until the test opens it."""

    def __init__(self, core: EngineCore) -> None:
        self._launch = core.executor.launch
        self._open = threading.Semaphore(0)
        core.executor.launch = self._gated  # type: ignore[method-assign]

    def let_pass(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._open.release()

    def _gated(self, batch: Sequence[ScheduledSequence]) -> StepHandle:
        handle = self._launch(batch)
        return Handle(lambda: self._wait(handle), handle.choose)

    def _wait(self, handle: StepHandle) -> list[StepResult]:
        assert self._open.acquire(timeout=60)
        return handle.results()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
async def test_started_reaches_the_loop_while_its_step_still_computes(max_steps_in_flight: int) -> None:
    core = make_core(max_steps_in_flight=max_steps_in_flight)
    gate = Gate(core)
    events: asyncio.Queue[EngineEvent] = asyncio.Queue()
    request = make_request([1, 2, 3], max_tokens=6, ignore_eos=True)
    async with running(core, unexpected) as thread, asyncio.timeout(60):
        await thread.call(lambda core: core.add(request, events.put_nowait))
        assert isinstance(await events.get(), Started)
        assert events.empty()
        gate.let_pass(6)
        told: list[int] = []
        while len(told) < 6:
            event = await events.get()
            assert isinstance(event, Tokens)
            told.extend(token.token_id for token in event.tokens)
        assert told == expected_tokens(request)
        await thread.call(assert_empty)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
async def test_cancel_posted_while_steps_compute_takes_effect_before_the_next_plan(max_steps_in_flight: int) -> None:
    core = make_core(max_steps_in_flight=max_steps_in_flight)
    gate = Gate(core)
    events: asyncio.Queue[EngineEvent] = asyncio.Queue()
    async with running(core, unexpected) as thread, asyncio.timeout(60):
        group = await thread.call(
            lambda core: core.add(make_request([1, 2], max_tokens=50, ignore_eos=True), events.put_nowait)
        )
        assert isinstance(group, Group)
        assert isinstance(await events.get(), Started)
        thread.post(lambda core: core.cancel(group))
        gate.let_pass(50)
        await thread.call(lambda core: None)
        num_told = events.qsize()
        assert num_told <= 1, "only the step that the thread was waiting for"
        while await thread.call(lambda core: core.has_work):
            pass
        await thread.call(assert_empty)
        assert events.qsize() == num_told


async def test_fault_of_a_step_is_reported_and_the_thread_lives() -> None:
    core = make_core()
    Spy(core).fail_launch_of = 0
    events: asyncio.Queue[EngineEvent] = asyncio.Queue()
    async with running(core, unexpected) as thread, asyncio.timeout(60):
        await thread.call(lambda core: core.add(make_request([1]), events.put_nowait))
        assert isinstance(await events.get(), Started)
        assert isinstance(await events.get(), Failed)
        await thread.call(lambda core: core.add(make_request([1]), events.put_nowait))
        assert isinstance(await events.get(), Started)
        assert isinstance(await events.get(), Tokens)


async def test_planning_that_never_ends_is_seen_as_a_running_step() -> None:
    core = make_core()
    seen: asyncio.Queue[RunningStep | None] = asyncio.Queue()
    loop, begin_step = asyncio.get_running_loop(), core.begin_step

    def watched() -> tuple[StepPlan, Emitted]:
        loop.call_soon_threadsafe(seen.put_nowait, thread.running_step)
        return begin_step()

    core.begin_step = watched  # type: ignore[method-assign]
    async with running(core, unexpected) as thread:
        await thread.call(lambda core: core.add(make_request([1]), Collector()))
        async with asyncio.timeout(60):
            step = await seen.get()
    assert step is not None
    assert step.shapes == ()


async def test_started_engine_waits_for_a_busy_event_loop_far_shorter_than_python_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    intervals = [0.005]
    monkeypatch.setattr("sys.getswitchinterval", lambda: intervals[-1])
    monkeypatch.setattr("sys.setswitchinterval", intervals.append)
    for _ in range(2):
        async with running(make_core(), unexpected):
            pass
    assert intervals[1] == intervals[2] <= 0.0005
