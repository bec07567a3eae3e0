"""An admission with everything around it, and a chooser that only counts pages."""

import asyncio
from typing import Any, cast

from prometheus_client import CollectorRegistry

from common.errors import RefusalCause, Refused
from common.ids import NO_ROOT, HashRoot, RequestId, WorkerId
from kvrelay.v1 import worker_pb2
from router.choosing.chooser import Chooser, Exclusion, Search
from router.fleet.booking import Booking, WorkerBooking
from router.fleet.decisions import DecisionRecord
from router.fleet.facts import WorkerEndpoint
from router.fleet.fleet import Fleet
from router.fleet.index import PrefixIndex
from router.fleet.member import Member
from router.line.admission import Admission
from router.line.fair_queue import FairQueue
from router.line.line import Line as RealLine
from router.line.pool_line import MAX_CANDIDATES, REST_ASKED_S
from router.line.read_ahead import LineReadAhead
from router.line.wait import Standing, Wait
from router.observe.metrics import RouterMetrics, TenantMetrics
from router.placement.answer_pool import AnswerPool
from router.placement.calibration import DurationForecast
from router.placement.loads import ProjectedLoad
from router.placement.plans import Busy, NoRoom, NoWorker, PlacementRequest, Plan, PolicySettings, TooSlow
from router.placement.policies.registry import POLICIES
from router.placement.waits import WaitCause
from router.record.ticket import Ticket
from router.tenants import Tenant, Terms
from tests.clock import ManualClock
from tests.trust import ROUTER

A, B = Tenant(name="a"), Tenant(name="b")
WORKER = WorkerId("d0")
PATIENCE_S = 10.0
REST_S = 1.01 * MAX_CANDIDATES * REST_ASKED_S
"""Longest rest of the line while one tenant waits."""


class PageChooser(Chooser):
    """Books when enough pages are free, and records the requests that it was asked about."""

    def __init__(self, fleet: Fleet, clock: ManualClock, *, num_pages: int, gap_s: float) -> None:
        policy = POLICIES["round_robin"](PolicySettings())
        super().__init__(fleet=fleet, index=PrefixIndex(), policy=policy, clock=clock)
        self.num_free = num_pages
        self.asked: list[str] = []
        self.hopeless: set[str] = set()
        self.is_saturated = False
        self.busy: set[str] = set()
        self.is_closed = False
        """Whether another answer would break the gaps of those that run."""
        self.is_empty = False
        """Whether no worker may be chosen."""
        self.defective: set[str] = set()
        """Requests for which the policy raises."""
        self.answers_s: dict[str, float] = {}
        """Time that answers take of decode workers."""
        self.unwanted: set[str] = set()
        """Requests that the worker has refused, and that no other worker has room for."""
        self.differs = False
        self.opens_s = 0.0
        self.place_s = 0.0
        """Time until another answer ends."""
        self._fleet = fleet
        self.time = clock
        self.gap_s = gap_s
        endpoint = WorkerEndpoint(worker_id=WORKER, role=worker_pb2.WORKER_ROLE_DECODE, address="nowhere:1")
        self._member = Member(endpoint=endpoint, client=cast(Any, None))

    def choose(self, search: Search) -> Booking | Refused:
        request = search.request
        self.asked.append(request.request_id)
        if request.request_id in self.defective:
            raise ZeroDivisionError("division by zero")
        if request.request_id in self.hopeless:
            return Refused(reason="too late", retry_after_s=3.0, cause=RefusalCause.DEADLINE)
        if self.is_saturated:
            return NoRoom(reason="all is full", retry_after_s=1.0, cause=RefusalCause.SATURATED)
        if request.request_id in self.busy:
            return Busy(
                reason="busy",
                retry_after_s=5.0,
                worker=ProjectedLoad(worker_id=WORKER, num_blocks=0, num_free_blocks=0),
            )
        if self.is_empty:
            return NoWorker(reason="no worker", retry_after_s=1.0)
        if self.is_closed:
            return TooSlow(reason="gaps would be too long", retry_after_s=1.0)
        if request.request_id in self.unwanted:
            search.exclusions[WORKER] = Exclusion(load_version=0, until_s=self.time.monotonic() + PATIENCE_S)
        if request.num_tokens > self.num_free or search.exclusions:
            return NoRoom(reason=f"{self.num_free} pages are free", retry_after_s=1.0)
        self.num_free -= request.num_tokens
        plan = Plan(answering=WORKER, predicted_cached_tokens=0, reason="")
        hold = WorkerBooking(
            member=self._member,
            epoch=cast(Any, 1),
            request_id=request.request_id,
            booked_s=0.0,
            load_version=0,
            num_blocks=request.num_tokens,
        )

        def free(booking: Booking) -> None:
            self.num_free += booking.answering.num_blocks
            booking.answering.num_blocks = 0
            self.change()

        decision = DecisionRecord(
            request_id=request.request_id, tenant="", num_tokens=request.num_tokens, plan=plan, decided_s=0.0
        )
        return Booking(decision=decision, answering=hold, on_release=free)

    def forecast_in_line(
        self, request: PlacementRequest, *, work_s: float, before_s: float, num_ends: float
    ) -> DurationForecast:
        wait_s = max(before_s + work_s, num_ends * self.place_s)
        return DurationForecast(expected_s=wait_s, predicted_s=wait_s)

    def has_changed(self, worker: ProjectedLoad) -> bool:
        return self.differs

    def may_hold(self, request: PlacementRequest) -> bool:
        return not self.is_saturated and request.num_tokens <= self.num_free

    def opens_at_s(self) -> float:
        return self.opens_s

    def work_s(self, request: PlacementRequest) -> float:
        return float(request.num_tokens)

    def size_s(self, request: PlacementRequest, work_s: float, *, answer_price: float) -> float:
        return (1 - answer_price) * work_s + answer_price * self.answers_s.get(request.request_id, 0.0)

    def change(self) -> None:
        """Report a change of the fleet, after a rest of the line."""
        self.time.advance(self.gap_s)
        self._fleet.set_workers([])


class Line:
    """An admission with everything around it."""

    def __init__(self, *, num_pages: int = 8, max_queued: int | None = 100, gap_s: float = REST_S) -> None:
        """`gap_s`: time before each event, in which the line rests."""
        self.gap_s = gap_s
        self.clock = ManualClock(100.0)
        self.fleet = Fleet(index=PrefixIndex(), clock=self.clock, reach=ROUTER)
        self.chooser = PageChooser(self.fleet, self.clock, num_pages=num_pages, gap_s=gap_s)
        self.registry = CollectorRegistry()
        queues: dict[AnswerPool, FairQueue[Wait]] = {pool: FairQueue() for pool in AnswerPool}
        self.queue = queues[AnswerPool.DECODE]
        self.admission = Admission(
            fleet=self.fleet,
            queues=queues,
            clock=self.clock,
            max_queued=max_queued,
            metrics=TenantMetrics(self.registry),
        )
        self.metrics = RouterMetrics()
        self.index = PrefixIndex()
        self.readers: dict[WorkerId, Member] = {}
        """Workers that read blocks of waiting requests from their tiers, which the index knows."""
        self.line = RealLine(
            admission=self.admission,
            queues=queues,
            chooser=self.chooser,
            fleet=self.fleet,
            ahead=LineReadAhead(
                index=self.index,
                members=self.readers,
                admission=self.admission,
                metrics=self.metrics,
                clock=self.clock,
            ),
            clock=self.clock,
        )
        self.tickets: dict[str, Ticket] = {}
        self.waits_by_name: dict[str, Wait] = {}
        self.waiting: dict[str, asyncio.Task[Booking]] = {}
        self.told: list[tuple[str, float | None]] = []
        """Requests that were told that they wait, with the forecast of their first token."""

    def admit(self, tenant: Tenant = A, *, priority: int = 0) -> Ticket:
        ticket = self.admission.admit(tenant, Terms(priority=priority))
        assert isinstance(ticket, Ticket), ticket
        return ticket

    def refusal(self, tenant: Tenant = A) -> Refused:
        refused = self.admission.admit(tenant, Terms())
        assert isinstance(refused, Refused)
        return refused

    async def come(self, name: str, num_pages: int, tenant: Tenant = A, *, priority: int = 0, **fields: Any) -> None:
        """Admit a request and let it wait for a plan; `fields` are those of a `PlacementRequest`."""
        self.tickets[name] = self.admit(tenant, priority=priority)
        await self.place(name, num_pages, **fields)

    async def place(
        self,
        name: str,
        num_pages: int,
        *,
        patience_s: float = PATIENCE_S,
        after_s: float | None = None,
        root: HashRoot = NO_ROOT,
        **fields: Any,
    ) -> None:
        self.clock.advance(self.gap_s if after_s is None else after_s)
        request = PlacementRequest(
            request_id=RequestId(name), num_tokens=num_pages, block_size=1, num_output_tokens=0, **fields
        )
        self.waits_by_name[name] = Wait(
            ticket=self.tickets[name],
            request=request,
            root=root,
            patience_ends_s=self.clock.monotonic() + patience_s,
            standing=Standing.of(self.tickets[name], is_set_back=False),
            on_waiting=lambda forecast: self.told.append((name, None if forecast is None else forecast.expected_s)),
        )
        self.waiting[name] = asyncio.create_task(self.line.place(self.waits_by_name[name]))
        await turns()

    async def refuse(self, name: str) -> None:
        """Let the worker refuse a booked plan; the request waits for another one."""
        self.waiting.pop(name).result().release()
        self.waiting[name] = asyncio.create_task(self.line.place(self.waits_by_name[name]))
        await turns()

    async def end(self, name: str) -> None:
        """End a request that has a plan."""
        self.waiting.pop(name).result().release()
        self.clock.advance(self.gap_s)
        self.tickets.pop(name).__exit__(None, None, None)
        await turns()

    async def leave(self, name: str) -> None:
        """Cancel a waiting request."""
        self.clock.advance(self.gap_s)
        task = self.waiting.pop(name)
        task.cancel()
        await turns()
        assert task.cancelled()
        self.tickets.pop(name).__exit__(None, None, None)
        await turns()

    def waits(self, name: str) -> dict[WaitCause, float]:
        """Return what a request with a plan waited for, without what it did not wait for."""
        return {cause: wait_s for cause in WaitCause if (wait_s := self.waiting[name].result().decision.waits[cause])}

    @property
    def served(self) -> set[str]:
        return {name for name, task in self.waiting.items() if task.done()}

    @property
    def counts(self) -> tuple[int, int]:
        return self.line.num_queued, self.admission.num_active


async def turns() -> None:
    """Run the event loop until nothing is left to do."""
    for _ in range(5):
        await asyncio.sleep(0)
