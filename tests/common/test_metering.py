"""Who pays for the time that tasks take of the event loop."""

import asyncio
from types import SimpleNamespace

import pytest

from common import metering
from common.metering import Metered, charge, charge_to, is_charged
from common.structured import TaskCensus


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
        monkeypatch.setattr(metering, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    async def steps(self, *seconds: float) -> str:
        for step_s in seconds:
            self.now_s += step_s
            await asyncio.sleep(0)
        return "done"

    async def paid_by(self, account: Account, *seconds: float) -> str:
        charge_to(account)
        return await self.steps(*seconds)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


async def test_each_tenant_pays_for_the_steps_of_its_own_tasks(work: Work) -> None:
    one, other = Account(), Account()
    done = await asyncio.gather(
        asyncio.create_task(Metered(work.paid_by(one, 1.0, 2.0))),
        asyncio.create_task(Metered(work.paid_by(other, 4.0))),
        asyncio.create_task(Metered(work.steps(8.0))),  # has no payer
    )
    assert (done, one.seconds, other.seconds) == (["done"] * 3, 3.0, 4.0)


async def test_tasks_that_a_request_starts_are_charged_to_its_tenant(work: Work) -> None:
    account, census = Account(), TaskCensus()

    async def serve() -> None:
        charge_to(account)
        async with census.owned(_ignored(work.steps(1.0)), _ignored(work.steps(2.0))) as tasks:
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

    task = asyncio.create_task(Metered(fail()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert account.seconds == 1.0


async def _ignored(steps: "asyncio.Future[str] | object") -> None:
    await steps  # type: ignore[misc]
