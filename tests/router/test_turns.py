"""Turns on the event loop: fair between tenants, bounded, and fewer when they are long."""

import asyncio

import pytest

from common.errors import RefusalCause, Refused
from router.line import turns as module
from router.line.turns import LONG_S, MAX_BEGUN, MAX_WAITING, Turns
from router.tenants import Tenant

LOUD, QUIET = Tenant(name="loud"), Tenant(name="quiet")


class Begun:
    """Requests of tenants, each of which takes `cost_s` of the loop when it begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns = Turns()
        self.cost_s = 0.0
        self.names: list[str] = []
        self._now_s = 0.0
        monkeypatch.setattr(module, "turn_time_s", lambda: self._now_s)

    def ask(self, tenant: Tenant, count: int = 1, *, is_running: bool = False) -> list["asyncio.Task[Refused | None]"]:
        return [asyncio.create_task(self._take(tenant, is_running)) for _ in range(count)]

    async def _take(self, tenant: Tenant, is_running: bool) -> Refused | None:
        refused = await self.turns.take(tenant, is_running=is_running)
        if refused is None:
            self.names.append(tenant.name)
            self._now_s += self.cost_s
            self.turns.charge(tenant, self.cost_s)
        return refused

    async def num_at_once(self) -> int:
        """Return how many of many requests begin in the same turn."""
        num_before = len(self.names)
        asked = self.ask(LOUD, 2 * MAX_BEGUN)
        await asyncio.sleep(0)
        num_begun = len(self.names) - num_before
        await asyncio.gather(*asked)
        return num_begun


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    return Begun(monkeypatch)


async def test_quiet_tenants_newcomer_is_next_whatever_another_has_waiting(begun: Begun) -> None:
    begun.cost_s = 2 * LONG_S
    asked = begun.ask(LOUD, 200)
    while len(begun.names) < 2 * MAX_BEGUN:  # noqa: ASYNC110 - each look is a turn of the loop
        await asyncio.sleep(0)
    num_before = len(begun.names)
    asked += begun.ask(QUIET)
    await asyncio.gather(*asked)
    assert begun.names.index("quiet") <= num_before + 2


async def test_one_tenant_cannot_have_more_than_so_many_waiting(begun: Begun) -> None:
    asked = begun.ask(LOUD, MAX_BEGUN + MAX_WAITING)
    (one_more,), (running,), (other,) = begun.ask(LOUD), begun.ask(LOUD, is_running=True), begun.ask(QUIET)
    refused = await one_more
    assert refused is not None
    assert (refused.cause, refused.retry_after_s > 0) == (RefusalCause.TENANT_QUEUE_FULL, True)
    assert not any(await asyncio.gather(running, other))
    assert await asyncio.gather(*asked) == [None] * len(asked)


async def test_request_that_leaves_frees_its_place(begun: Begun) -> None:
    asked = begun.ask(LOUD, MAX_BEGUN + MAX_WAITING)
    await asyncio.sleep(0)
    for task in asked[MAX_BEGUN:]:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert begun.turns.num_waiting == 0
    assert await asyncio.gather(*begun.ask(LOUD, MAX_WAITING)) == [None] * MAX_WAITING


async def test_long_turns_let_few_requests_begin_and_short_ones_many_again(begun: Begun) -> None:
    assert await begun.num_at_once() == MAX_BEGUN
    begun.cost_s = 2 * LONG_S
    await begun.num_at_once()
    assert await begun.num_at_once() == 1
    begun.cost_s = 0.0
    await begun.num_at_once()
    assert await begun.num_at_once() == MAX_BEGUN
