"""Shares of tenants in a full decode pool: who gives room, to whom, how much, and how often."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from benchmarks.router.in_process import BLOCK_SIZE, join
from common.config import RouterConfig
from common.errors import Overloaded
from common.ids import RequestId, WorkerId
from kvrelay.v1 import worker_pb2
from router.choosing.shedding import Shed
from router.fleet.booking import STAY_S
from router.line.pool_line import MAX_OVERTAKEN
from router.line.wait import Standing, Wait
from router.parts import build_router
from router.placement.plans import PlacementRequest
from router.record.ticket import Ticket
from router.tenants import Tenant, Terms
from tests.clock import ManualClock
from tests.router.fleets import TIMING
from tests.router.line import turns
from tests.trust import ROUTER

NUM_PLACES, NUM_BLOCKS = 8, 1000
REST_S = 0.06
"""Longer than any rest of the line."""
A, B, HEAVY = Tenant(name="a"), Tenant(name="b"), Tenant(name="heavy", weight=3.0)


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request that runs until the test ends it, and again after it was set back."""

    tenant: Tenant
    ticket: Ticket
    num_blocks: int
    num_samples: int
    num_output_tokens: int
    deadline_s: float
    end: asyncio.Event = field(default_factory=asyncio.Event)
    is_running: bool = False
    num_set_back: int = 0


class Pool:
    """A router over one decode worker, which reports what runs there. Names of requests begin with their tenant's."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.router = build_router(RouterConfig(), clock=self.clock, reach=ROUTER)
        _prefill, self._decode = join(self.router, 2, num_blocks=NUM_BLOCKS, num_free_blocks=NUM_BLOCKS)
        for link in asyncio.all_tasks() - {asyncio.current_task()}:
            link.cancel()  # there is no worker behind it
        self.requests: dict[str, Request] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._seq = 0

    async def come(
        self,
        *names: str,
        tenant: Tenant = A,
        num_blocks: int = 1,
        num_samples: int = 1,
        num_output_tokens: int = 0,
        at_once: bool = False,
        time_left_s: float = math.inf,
    ) -> None:
        """Let requests come one after the other, or at once, and wait until what they change has happened.

        `num_output_tokens`: expected length of their answers.
        """
        for name in names:
            ticket = self.router.admission.admit(tenant, Terms())
            assert isinstance(ticket, Ticket)
            request = Request(
                tenant=tenant,
                ticket=ticket,
                num_blocks=num_blocks,
                num_samples=num_samples,
                num_output_tokens=num_output_tokens,
                deadline_s=self.clock.monotonic() + time_left_s,
            )
            self.requests[name] = request
            self.tasks[name] = asyncio.create_task(self._run(name, request))
            if not at_once or name == names[-1]:
                await self.settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self.requests[name].end.set()
        await self.settle()

    async def settle(self) -> None:
        """Let the worker report what runs on it, twice: what was set back has left by the first time."""
        for _ in range(3):
            await turns()
            self.clock.advance(REST_S)
            running = [request for request in self.requests.values() if request.is_running]
            num_places = sum(request.num_samples for request in running)
            load = worker_pb2.LoadReport(
                num_running=num_places,
                num_decoding=num_places,
                num_free_slots=NUM_PLACES - num_places,
                num_free_blocks=NUM_BLOCKS - sum(request.num_blocks for request in running),
                num_blocks=NUM_BLOCKS,
            )
            self._seq += 1
            accepted = [name for name, request in self.requests.items() if request.is_running]
            update = worker_pb2.WatchWorkerResponse(seq=self._seq, load=load, accepted_request_ids=accepted)
            self.router.fleet.on_update(self.router.fleet.members_by_id[WorkerId(self._decode)], update)
        await turns()

    def running(self, tenant: str) -> list[str]:
        return [name for name, each in self.requests.items() if each.is_running and each.tenant.name == tenant]

    @property
    def set_back(self) -> dict[str, int]:
        """How often each request was set back, if ever."""
        return {name: each.num_set_back for name, each in self.requests.items() if each.num_set_back}

    async def _run(self, name: str, request: Request) -> None:
        with request.ticket:
            while not request.end.is_set():
                await self._attempt(name, request)

    async def _attempt(self, name: str, request: Request) -> None:
        """Run a plan as an orchestrator does."""
        wanted = PlacementRequest(
            request_id=RequestId(name),
            num_tokens=(request.num_blocks - 1) * BLOCK_SIZE + 1,
            block_size=BLOCK_SIZE,
            tenant=request.tenant,
            num_samples=request.num_samples,
            num_output_tokens=request.num_output_tokens,
            deadline_s=request.deadline_s,
        )
        wait = Wait(
            ticket=request.ticket,
            request=wanted,
            shed=Shed.DEADLINE,
            patience_ends_s=self.clock.monotonic() + 1e6,
            standing=Standing.of(request.ticket, is_set_back=request.num_set_back > 0),
        )
        with await self.router.line.place(wait) as booking:
            request.is_running = True
            computes = booking.prefill or booking.answering
            computes.member.note_prefilled(computes)
            try:
                booking.number, booking.num_set_back = request.ticket.number, request.num_set_back
                booking.count_blocks = lambda: request.num_blocks
                async with asyncio.timeout(None) as booking.running:
                    await request.end.wait()
            except TimeoutError:
                request.num_set_back += 1
            finally:
                booking.running, request.is_running = None, False


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[Pool]:
    pool = Pool()
    yield pool
    for task in pool.tasks.values():
        task.cancel()
    await asyncio.gather(*pool.tasks.values(), return_exceptions=True)
    await pool.router.fleet.aclose()


def names(tenant: str, count: int, first: int = 0) -> list[str]:
    return [f"{tenant}{number}" for number in range(first, first + count)]


async def test_tenant_that_comes_gets_its_share_from_the_latest_answers_of_another(pool: Pool) -> None:
    await pool.come(*names("a", 8))
    await pool.come("b0", tenant=B)
    assert (pool.running("a"), pool.running("b")) == (names("a", 7), ["b0"])
    await pool.come(*names("b", 7, first=1), tenant=B)
    assert (pool.running("a"), pool.running("b")) == (names("a", 4), names("b", 4))
    assert pool.set_back == dict.fromkeys(names("a", 4, first=4), 1)


async def test_only_those_that_may_set_no_answer_back_are_refused_when_none_ends_in_time(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.placement.loads.PoolLoads.answer_ends_in_s", lambda _self: 60.0)
    for member in pool.router.fleet.members:
        member.take_timing(TIMING)
    await pool.come(*names("a", 9), time_left_s=30.0)
    refused = pool.tasks["a8"].exception()
    assert isinstance(refused, Overloaded), "it would wait in vain until its deadline"
    assert "the first token is predicted in 60" in refused.message
    await pool.come("b0", tenant=B, time_left_s=30.0)
    assert pool.running("b") == ["b0"], "its share of the pool would stay with the other tenant"


async def test_share_goes_by_weight(pool: Pool) -> None:
    await pool.come(*names("a", 8))
    await pool.come(*names("heavy", 8), tenant=HEAVY)
    assert (len(pool.running("a")), len(pool.running("heavy"))) == (2, 6)


async def test_tenant_alone_uses_the_whole_pool_and_sets_none_of_its_own_answers_back(pool: Pool) -> None:
    await pool.come(*names("a", 12))
    assert (pool.running("a"), pool.set_back) == (names("a", 8), {})


async def test_place_that_comes_free_goes_to_the_tenant_with_fewer(pool: Pool) -> None:
    await pool.come(*names("a", 8))
    await pool.come(*names("b", 6), tenant=B)
    await pool.end("b0")
    assert (pool.running("a"), pool.running("b")) == (names("a", 4), names("b", 4, first=1))
    await pool.end("a0")
    assert (len(pool.running("a")), len(pool.running("b"))) == (4, 4)
    assert sum(pool.set_back.values()) == 4, "places went back and forth"


async def test_what_was_set_back_runs_again_before_what_its_tenant_sends_later(pool: Pool) -> None:
    await pool.come(*names("a", 8))
    await pool.come("b0", tenant=B)
    await pool.come("a8")
    await pool.end("b0")
    assert pool.running("a") == names("a", 8)


async def test_answer_that_runs_again_stays_each_time_twice_as_long(pool: Pool) -> None:
    await pool.come(*names("a", 8))
    for number, stay_s in enumerate((0.0, STAY_S, 2 * STAY_S)):
        pool.clock.advance(stay_s)
        await pool.come(f"b{number}", tenant=B)
        assert pool.set_back["a7"] == number + 1
        await pool.end(f"b{number}")
        await pool.come(f"b{number}-too-early", tenant=B)
        assert (pool.set_back["a7"], pool.set_back["a6"]) == (number + 1, number + 1), "the next latest goes"
        await pool.end(f"b{number}-too-early")


async def test_few_answers_with_most_pages_give_them_to_a_tenant_with_none(pool: Pool) -> None:
    await pool.come("a0", "a1", num_blocks=450)
    await pool.come("b0", tenant=B, num_blocks=300)
    assert (pool.running("a"), pool.running("b")) == (["a0"], ["b0"])


async def test_pages_kept_for_the_growth_of_an_answer_go_with_it(pool: Pool) -> None:
    await pool.come("a0", num_samples=NUM_PLACES, num_output_tokens=NUM_BLOCKS * BLOCK_SIZE)
    await pool.come("b0", tenant=B)
    assert (pool.running("b"), pool.set_back) == (["b0"], {"a0": 1})


async def test_room_that_others_grow_into_is_made_once_more(pool: Pool) -> None:
    await pool.come("a0", "a1", num_blocks=200)
    await pool.come("a2", num_blocks=550)

    async def grow() -> None:
        while not pool.set_back:  # noqa: ASYNC110 - a few turns
            await asyncio.sleep(0)
        pool.requests["a0"].num_blocks = 600

    growing = asyncio.create_task(grow())
    await pool.come("b0", tenant=B, num_blocks=300)
    await growing
    await pool.settle()
    assert (pool.running("b"), pool.set_back) == (["b0"], {"a2": 1, "a1": 1})


async def test_no_answer_is_set_back_for_a_request_that_would_have_more_than_the_other(pool: Pool) -> None:
    await pool.come("a0", "a1", num_blocks=450)
    await pool.come("b0", tenant=B, num_blocks=950)
    assert (pool.running("a"), pool.set_back) == (["a0", "a1"], {})


async def test_one_answer_gives_its_place_and_not_one_with_many_samples(pool: Pool) -> None:
    await pool.come("a0", num_samples=1)
    await pool.come("a1", num_samples=7)
    await pool.come("b0", tenant=B)
    assert pool.set_back == {"a0": 1}


async def test_room_that_was_made_does_not_go_to_others_that_wait(pool: Pool) -> None:
    await pool.come(*names("a", 8), num_blocks=120)
    await pool.come(*names("a", 4, first=8), num_blocks=100)
    await pool.come("b0", tenant=B, num_blocks=300)
    assert pool.running("b") == ["b0"]
    assert len(pool.set_back) == 3


async def test_request_for_the_whole_pool_gets_its_turn_beside_a_busy_tenant(pool: Pool) -> None:
    await pool.come("b0", tenant=B)
    await pool.come("a0", num_samples=NUM_PLACES)
    for number in range(3 * MAX_OVERTAKEN):  # at its first turn it is set back
        await pool.come(f"b{number + 1}", tenant=B)
        await pool.end(f"b{number}")
        if pool.running("a"):
            break
    assert (pool.running("a"), pool.set_back) == (["a0"], {"a0": 1})


async def test_requests_that_come_at_once_get_room_at_once_and_no_more_than_they_need(pool: Pool) -> None:
    await pool.come(*names("a", 8))
    await pool.come(*names("b", 3), tenant=B, at_once=True)
    assert (pool.running("b"), len(pool.set_back)) == (names("b", 3), 3)
