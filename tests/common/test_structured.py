"""Owned tasks end with their owner, and a cancellation is never lost."""

import asyncio
from collections import Counter

import pytest

from common.errors import EngineFault
from common.structured import TaskTracker, all_or_first_failure, completed, keep_going


async def forever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise EngineFault("step")


async def test_failing_task_ends_the_others_and_leaves_the_owner_uncancelled() -> None:
    tracker = TaskTracker()
    with pytest.raises(EngineFault):
        async with tracker.owned(forever(), fail()) as tasks:
            await all_or_first_failure(tasks)
    owner = asyncio.current_task()
    assert owner is not None
    assert (owner.cancelling(), tracker.num_tasks) == (0, 0)


async def test_many_cancelled_tasks_end_in_several_turns_each_cancelled_once() -> None:
    tracker, ended = TaskTracker(), Counter[int]()
    tasks: tuple[asyncio.Task[None], ...] = ()

    async def undo_slowly(number: int) -> None:
        try:
            await forever()
        finally:
            for _ in range(5):  # a second cancellation would end this
                await asyncio.sleep(0)
            ended[number] += 1

    def in_this_turn() -> int:
        return sum(task.cancelling() for task in tasks)

    async def own() -> None:
        nonlocal tasks
        async with tracker.owned(*map(undo_slowly, range(100))) as tasks:
            await forever()

    owner = asyncio.create_task(own())
    for _ in range(3):
        await asyncio.sleep(0)
    owner.cancel()
    await asyncio.sleep(0)
    assert 0 < in_this_turn() < 20
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert ended == Counter(range(100))


async def test_owner_cancelled_twice_still_waits_for_its_tasks() -> None:
    tracker, release, began = TaskTracker(), asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await forever()
        finally:
            began.set()
            await release.wait()

    async def own() -> None:
        async with tracker.owned(stubborn()) as tasks:
            await all_or_first_failure(tasks)

    owner = asyncio.create_task(own())
    for _ in range(3):  # until the task waits
        await asyncio.sleep(0)
    owner.cancel()
    await began.wait()
    owner.cancel()
    await asyncio.sleep(0)
    assert not owner.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert tracker.num_tasks == 0


async def test_failing_task_does_not_hide_the_cancellation_of_its_owner() -> None:
    tracker = TaskTracker()
    gate = asyncio.Event()

    async def fail_later() -> None:
        await gate.wait()
        raise EngineFault("step")

    async def own() -> None:
        async with tracker.owned(fail_later()) as tasks:
            await all_or_first_failure(tasks)

    owner = asyncio.create_task(own())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gate.set()
    owner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await owner


async def test_step_that_must_be_completed_is_so_before_its_cancellation_is_raised() -> None:
    may_end, done = asyncio.Event(), list[str]()

    async def step() -> None:
        await may_end.wait()
        done.append("step")

    caller = asyncio.create_task(completed(step()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == ["step"]


async def test_endless_work_that_fails_is_logged_and_begins_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("common.structured._PAUSE_S", 0.0)
    has_begun_again, num_begun = asyncio.Event(), 0

    async def work() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 1:
            raise MemoryError
        has_begun_again.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(keep_going("counting", work))
    async with asyncio.timeout(60):
        await has_begun_again.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert [record.message for record in caplog.records] == ["counting failed, and begins again"]
