"""Displacement: each tenant can always hold its weighted share of the line; only the rest is borrowed."""

import asyncio
import random
from collections import Counter

import pytest

from common.errors import Overloaded, RefusalCause, Refused
from router.record.ticket import Ticket
from router.tenants import Tenant
from tests.router.line import A, B, Line, turns

HEAVY, LIMITED = Tenant(name="heavy", weight=3.0), Tenant(name="limited", requests_per_min=1)


def fill(line: Line, tenant: Tenant, num_requests: int) -> list[Ticket]:
    return [line.admit(tenant) for _ in range(num_requests)]


def num_queued(line: Line, tenant: Tenant) -> int:
    return next(account.num_queued for account in line.admission.accounts if account.tenant is tenant)


async def test_tenant_with_nothing_in_line_gets_in_when_another_has_filled_it() -> None:
    line = Line(num_pages=0, max_queued=4)
    for name in "wxyz":
        await line.come(name, 1)
    await line.come("b", 1, B)
    newest = line.waiting["z"].exception()
    assert isinstance(newest, Overloaded)
    assert newest.retry_after_s is not None and newest.retry_after_s > 0
    assert {name for name, task in line.waiting.items() if not task.done()} == {"w", "x", "y", "b"}
    assert line.counts == (4, 0)
    assert line.registry.get_sample_value(
        "kvrelay_tenant_refusals_total", {"tenant": "a", "cause": RefusalCause.QUEUE_FULL.value}
    )
    for task in line.waiting.values():
        task.cancel()


async def test_two_tenants_share_a_full_line_by_weight_without_displacing_in_turn() -> None:
    line = Line(max_queued=8)
    fill(line, A, 8)
    assert [line.admission.admit(HEAVY).__class__ for _ in range(7)] == [Ticket] * 6 + [Refused]
    assert (num_queued(line, A), num_queued(line, HEAVY)) == (2, 6)
    assert line.refusal(A).cause is RefusalCause.QUEUE_FULL


async def test_request_that_is_being_read_ends_at_once_when_its_place_is_given_away() -> None:
    line = Line(max_queued=1)
    light = line.admit(Tenant(name="light", weight=0.1))

    async def read() -> None:
        async with light.kept():
            await asyncio.get_running_loop().create_future()

    reading = asyncio.create_task(read())
    await turns()
    line.admit(B)
    await turns()
    assert isinstance(reading.exception(), Overloaded)


async def test_request_that_was_displaced_before_it_stands_in_line_gets_no_plan() -> None:
    line = Line(num_pages=0, max_queued=2)
    line.tickets["y"], line.tickets["z"] = fill(line, A, 2)
    line.admit(B)
    await line.place("z", 1)
    assert isinstance(line.waiting["z"].exception(), Overloaded)
    line.tickets.pop("z").__exit__(None, None, None)
    assert line.counts == (2, 0)


async def test_request_with_a_plan_is_never_displaced() -> None:
    line = Line(num_pages=1, max_queued=2)
    await line.come("served", 1)
    await line.come("waits", 1)
    line.admit(B)
    line.admission.admit(B)
    assert line.tickets["served"].displaced is None
    assert line.tickets["waits"].displaced is None
    line.waiting["waits"].cancel()


async def test_tenant_beyond_its_own_rate_displaces_no_request() -> None:
    line = Line(max_queued=4)
    tickets = fill(line, A, 3)
    line.admit(LIMITED).__exit__(None, None, None)
    tickets += fill(line, A, 1)
    assert line.refusal(LIMITED).cause is RefusalCause.REQUEST_RATE
    assert all(ticket.displaced is None for ticket in tickets)


async def test_displaced_request_does_not_count_against_its_tenants_rate() -> None:
    line = Line(max_queued=2)
    twice = Tenant(name="twice", requests_per_min=2, weight=0.1)
    fill(line, twice, 2)
    line.admit(B)
    assert line.refusal(twice).cause is RefusalCause.QUEUE_FULL
    line.tickets["b"] = line.admit(B)  # the other of the two
    line.tickets["b"].__exit__(None, None, None)
    line.admit(twice)


@pytest.mark.parametrize("seed", range(50))
def test_no_tenant_within_its_reservation_is_refused_while_another_borrows(seed: int) -> None:
    """In any order of arrivals and departures, the bound and the promises of `account_above` hold."""
    draw = random.Random(seed)
    weights = draw.choices([0.5, 1.0, 2.0, 5.0], k=draw.randint(1, 5))
    max_queued, share_coming = draw.randint(1, 20), draw.choice([0.5, 0.7, 0.9])
    tenants = [Tenant(name=f"t{index}", weight=weight) for index, weight in enumerate(weights)]
    reserved = {tenant.name: max_queued * tenant.weight / sum(weights) for tenant in tenants}
    line = Line(max_queued=max_queued)
    held: list[Ticket] = []
    for _ in range(150):
        tenant = draw.choice(tenants)
        before = Counter(ticket.account.tenant.name for ticket in held)
        if draw.random() < share_coming:
            outcome = line.admission.admit(tenant)
            if isinstance(outcome, Refused):
                assert before[tenant.name] + 1 > reserved[tenant.name]
                continue
            held.append(outcome)
            for displaced in [ticket for ticket in held if ticket.displaced is not None]:
                victim = displaced.account.tenant.name
                assert before[victim] > reserved[victim]
                assert displaced.number == max(t.number for t in held if t.account.tenant.name == victim)
                held.remove(displaced)
        elif own := [ticket for ticket in held if ticket.account.tenant is tenant]:
            own[0].__exit__(None, None, None)
            held.remove(own[0])
        assert line.line.num_queued == len(held) <= max_queued
