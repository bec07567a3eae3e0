"""Admission in any order of events: counts balance, and no request is forgotten."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import Overloaded
from router.line.pool_line import MAX_REST_S
from router.tenants import Tenant
from tests.router.line import A, B, Line


class LineMachine(RuleBasedStateMachine):
    """Any order of arriving, ending, losing a worker, leaving: counts balance, and no request is forgotten."""

    TENANTS = (A, B, Tenant(name="capped", max_concurrent=1, weight=2.0), Tenant(name="short", max_queued=2))

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.line = self.run(self.make)
        self.number = 0
        self.sizes: dict[str, int] = {}

    async def make(self) -> Line:
        return Line(num_pages=6, max_queued=10, gap_s=MAX_REST_S)

    def run(self, function: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        async def call() -> Any:
            return await function(*args, **kwargs)

        return self.loop.run_until_complete(call())

    @rule(tenant=st.sampled_from(TENANTS), num_pages=st.integers(1, 6), priority=st.integers(0, 2))
    def come(self, tenant: Tenant, num_pages: int, priority: int) -> None:
        accounts = {account.tenant: account.num_queued for account in self.line.admission.accounts}
        num_own, num_unplanned = accounts.get(tenant, 0), sum(accounts.values())
        highest = max((num / other.weight for other, num in accounts.items()), default=0.0)
        is_full = num_unplanned >= 10 and highest <= (num_own + 1) / tenant.weight
        if is_full or (tenant.max_queued is not None and num_own >= tenant.max_queued):
            assert self.line.refusal(tenant).retry_after_s > 0
            return
        self.number += 1
        name = f"{self.number}"
        self.sizes[name] = num_pages
        self.run(self.line.come, name, num_pages, tenant, priority=priority)
        displaced = [name for name, ticket in self.line.tickets.items() if ticket.displaced is not None]
        assert len(displaced) == (num_unplanned >= 10)
        for name in displaced:
            assert isinstance(self.line.waiting.pop(name).exception(), Overloaded)
            assert not self.line.tickets[name].has_plan
            self.line.tickets.pop(name).__exit__(None, None, None)

    @precondition(lambda self: self.line.served)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.run(self.line.end, data.draw(st.sampled_from(sorted(self.line.served))))

    @precondition(lambda self: self.line.served)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.line.served)))

        async def lose() -> None:
            self.line.waiting.pop(name).result().release()
            await self.line.place(name, self.sizes[name])

        self.run(lose)

    @precondition(lambda self: set(self.line.waiting) - self.line.served)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.run(self.line.leave, data.draw(st.sampled_from(sorted(set(self.line.waiting) - self.line.served))))

    @rule(seconds=st.floats(0.1, 5))
    def pass_time(self, seconds: float) -> None:
        self.line.clock.advance(seconds)

    @invariant()
    def counts_balance(self) -> None:
        line = self.line
        waiting = set(line.waiting) - line.served
        unplanned = {name for name, ticket in line.tickets.items() if not ticket.has_plan}
        assert line.line.num_queued == len(waiting)
        assert line.admission.num_active == len(line.tickets) - len(unplanned)
        assert line.chooser.num_free == 6 - sum(self.sizes[name] for name in line.served)
        for account in line.admission.accounts:
            assert account.num_queued == sum(line.tickets[name].account is account for name in unplanned)
            cap = account.tenant.max_concurrent
            assert cap is None or account.num_active <= cap

    @invariant()
    def no_request_waits_for_nothing(self) -> None:
        line = self.line
        waiting = [line.tickets[name] for name in set(line.waiting) - line.served]
        if not line.served and waiting:  # all pages are free, so some request must be served
            assert all(not ticket.has_plan and ticket.account.is_full for ticket in waiting)

    def teardown(self) -> None:
        while self.line.waiting:
            assert self.line.served, "requests wait and none is served"
            self.run(self.line.end, min(self.line.served))
        assert self.line.counts == (0, 0)
        assert self.line.chooser.num_free == 6
        self.loop.close()


TestLineMachine = LineMachine.TestCase
TestLineMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
