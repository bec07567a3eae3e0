"""Who pays for the time that tasks take of the event loop."""

import asyncio

import pytest

from common import metering
from common.metering import Metered, charge, charge_to, is_charged
from common.structured import TaskTracker


class Account:
    """Adds up what it is charged."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def pay(self, seconds: float) -> None:
        self.seconds += seconds


class Work:
    """Coroutines whose steps take given seconds of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(metering, "turn_time_s", lambda: self.now_s)

    async def steps(self, *seconds: float) -> str:
        for step_s in seconds:
            self.now_s += step_s
            await asyncio.sleep(0)
        return "done"

    async def step(self, seconds: float) -> None:
        await self.steps(seconds)

    async def paid_by(self, account: Account, *seconds: float) -> str:
        charge_to(account)
        return await self.steps(*seconds)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


async def test_each_tenant_pays_for_the_steps_of_its_own_tasks(work: Work) -> None:
    one, other = Account(), Account()
    nobodys = work.steps(8.0)
    works = (Metered(each) for each in (work.paid_by(one, 1.0, 2.0), work.paid_by(other, 4.0), nobodys))
    done: list[str] = await asyncio.gather(*map(asyncio.create_task, works))
    assert done == ["done"] * 3
    assert (one.seconds, other.seconds) == (3.0, 4.0)


async def test_tasks_that_a_request_starts_are_charged_to_its_tenant(work: Work) -> None:
    account, tracker = Account(), TaskTracker()

    async def serve() -> None:
        charge_to(account)
        async with tracker.owned(work.step(1.0), work.step(2.0)) as tasks:
            await asyncio.wait(tasks)

    await asyncio.create_task(Metered(serve()))
    assert account.seconds == 3.0
    assert not is_charged()
    charge(1.0)  # nobody's


async def test_step_that_fails_or_is_cancelled_is_paid(work: Work) -> None:
    account = Account()

    async def fail() -> None:
        charge_to(account)
        try:
            await asyncio.Event().wait()
        finally:
            work.now_s += 1.0

    task: asyncio.Task[None] = asyncio.create_task(Metered(fail()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert account.seconds == 1.0
