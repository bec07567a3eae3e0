"""EngineThread: commands between steps, cancelled callers, and the death of the thread."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from common.errors import PromptTooLong, Refused
from engine.core import EngineCore
from engine.group import Group
from engine.thread import EngineThread
from tests.builders import Collector, assert_empty, make_core, make_request


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


def reserve(core: EngineCore) -> Group | Refused:
    return core.reserve(make_request(range(9)), Collector())


def cancel(core: EngineCore, group: Group | Refused) -> None:
    assert isinstance(group, Group)
    core.cancel(group)


async def test_thread_when_bookkeeping_raises_dies_and_tells_its_owner() -> None:
    faults: asyncio.Queue[Exception] = asyncio.Queue()
    core = make_core()

    def broken() -> None:
        raise AssertionError("block 3: ref_cnt -1")

    core.begin_step = broken  # type: ignore[method-assign,assignment]
    async with running(core, faults.put_nowait) as thread:
        await thread.call(lambda core: core.add(make_request([1]), Collector()))
        async with asyncio.timeout(5):
            fault = await faults.get()
    assert str(fault) == "block 3: ref_cnt -1"


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
