"""Admission: which request gets a plan, and when.

1. `admit`: a request gets a *ticket*, or a refusal because the line or its tenant's share is full or a rate is used up.
   This is cheap and happens before anything is tokenized; `take_tokens` follows when the size is known. In a full line
   a newcomer may displace a request of a tenant that has more than its share (`account_above`).
2. `place`: the request waits in line (fair_queue.py) until the chooser books a plan for it. Requests that lost a worker
   go before all newcomers, in order of arrival. A newcomer that a worker refused takes its former place again.
3. The line is served whenever the fleet changes, a request ends or an exclusion expires; there is no polling. When the
   next request finds no plan, a few of each tenant behind it may go ahead, until it has been overtaken MAX_OVERTAKEN
   times. A tenant's embeddings, which another pool answers than its generations, stand in a lane of their own.
4. What a request really got corrects what its tenant was charged for the plan: `correct_cached` when its prompt begins,
   `settle` when it ends.

A worker that refuses a request is offered it again only when its load has changed or the time that it named has passed
(chooser.py). A request that prefers to wait for a busy worker is asked again when that worker's load changes, when it
should be free, or when a worker becomes free after none was. A refusal is final when waiting cannot help
(`find_hopeless` in chooser.py).
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from common.clock import Clock
from common.errors import Overloaded, RefusalCause, Refused, WorkerLost
from kvrelay.v1 import inference_pb2
from router.admission.account import Account, Service, account_above, open_account
from router.admission.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, FairQueue, Place, rank
from router.admission.lanes import SkippedLanes, lane_of, lanes_of, share_of
from router.admission.limits import Pace
from router.admission.ticket import QueuedRequest, Ticket
from router.fleet import Fleet
from router.metrics import TenantMetrics
from router.placement.chooser import Chooser
from router.placement.decisions import Booking
from router.tenants import ANYBODY, NO_TERMS, Overload, Tenant, Terms

MIN_QUEUED = 512
"""Places in the line of a small fleet, unless configured."""
QUEUED_PER_WORKER = 4
"""Places in the line of a large one, for each worker: many requests wait for the worker that computes their prefix."""
MAX_CANDIDATES = 4
"""Requests of each tenant that are tried when none before them found a plan."""
MAX_OVERTAKEN = 32
"""Plans that requests behind a waiting one may get before it."""
MIN_BUSY_S = 0.005
"""Shortest pause before a request that waits for one busy worker is tried again."""


class Admission:
    """The line. Event loop only."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        chooser: Chooser,
        clock: Clock,
        max_queued: int | None,
        metrics: TenantMetrics,
        late_share: float = 0.0,
    ) -> None:
        """`late_share`: largest share of a tenant's work that goes to late requests while others wait."""
        self._fleet = fleet
        self._chooser = chooser
        self._clock = clock
        self._max_queued = max_queued
        self._metrics = metrics
        self._next_number = 0
        self._num_unplanned = 0
        self.num_queued_tokens = 0
        """Tokens of the queued requests whose size is known."""
        self.num_refused = 0
        """Requests refused before any worker was asked for anything."""
        self._num_changes = 0
        self._accounts: dict[str, Account] = {}
        self._queue: FairQueue[QueuedRequest] = FairQueue(late_share=late_share)
        self._pace = Pace()
        self._timer: asyncio.TimerHandle | None = None
        self._opens_s = 0.0
        """Time at which the first worker is free for another prompt, as of the last look."""
        self._num_openings = 0
        """Times that a worker became free after none was."""
        self._is_open = False
        self._waits_for_workers = False
        """All requests tried last wait for that time, and none has arrived since."""
        fleet.subscribe(self._on_change)
        metrics.watch(lambda: self.accounts)

    @property
    def accounts(self) -> tuple[Account, ...]:
        """Accounts of all tenants seen so far. Any thread."""
        return tuple(self._accounts.values())

    @property
    def num_queued(self) -> int:
        """Requests that wait for a plan, those that lost theirs included."""
        return self._num_unplanned + self._queue.num_first

    @property
    def num_in_line(self) -> int:
        """Places in the line; a request whose samples are served separately has several."""
        return len(self._queue)

    @property
    def max_queued(self) -> int:
        """Most requests that wait for a first plan."""
        if self._max_queued is not None:
            return self._max_queued
        return max(MIN_QUEUED, QUEUED_PER_WORKER * len(self._fleet.members_by_id))

    @property
    def num_active(self) -> int:
        """Requests that have had a plan and have not ended."""
        return sum(account.num_active for account in self.accounts)

    @property
    def refusals(self) -> tuple[inference_pb2.TenantRefusals, ...]:
        """Refused requests by tenant and cause."""
        return tuple(
            inference_pb2.TenantRefusals(tenant=tenant, cause=cause, num_refused=count)
            for tenant, cause, count in self._metrics.refusals
        )

    # At the door.

    def admit(self, tenant: Tenant = ANYBODY, terms: Terms = NO_TERMS) -> Ticket | Refused:
        """Return a ticket, or why there is none."""
        now_s = self._clock.monotonic()
        account, above = self._account(tenant, now_s), None
        if self._num_unplanned >= self.max_queued:
            above = account_above(account, self._accounts.values())
            if above is None:
                return self._count(tenant.name, self._full(now_s))
        if (no := account.take_request(now_s)) is not None:
            return self._count(tenant.name, no)
        if above is not None:
            self._displace(above, now_s)
        ticket = Ticket(number=self._next_number, account=account, terms=terms, received_s=now_s, on_close=self._close)
        self._next_number += 1
        if not self._num_unplanned:
            self._pace.begin(now_s)
        if not account.num_queued:
            account.pace.begin(now_s)
        self._num_unplanned += 1
        account.waiting[ticket.number] = ticket
        return ticket

    def _full(self, now_s: float) -> Refused:
        reason = f"{self._num_unplanned} requests are waiting; the limit is {self.max_queued}"
        return Refused(reason=reason, retry_after_s=self._pace.promise_s(now_s), cause=RefusalCause.QUEUE_FULL)

    def _displace(self, account: Account, now_s: float) -> None:
        """Refuse the account's newest request without a plan, whatever it is doing."""
        refused = self._count(account.tenant.name, self._full(now_s))
        _number, ticket = account.waiting.popitem()
        self._num_unplanned -= 1
        account.give_back_request(now_s)
        ticket.displace(refused)

    @contextmanager
    def inquiry(self, tenant: Tenant) -> Iterator[None]:
        """Count a call that needs the tokenizer but no worker, for the duration of the block.

        Raises Overloaded when the tenant has too many such calls at once, or its rate is used up.
        """
        now_s = self._clock.monotonic()
        account = self._account(tenant, now_s)
        if (refused := account.take_inquiry(now_s)) is not None:
            self._count(tenant.name, refused)
            raise refused.error()
        account.num_inquiries += 1
        try:
            yield
        finally:
            account.num_inquiries -= 1

    def take_tokens(self, ticket: Ticket, expected: Service) -> Refused | None:
        """Count the tokens of a request against the rate of its tenant; or return why not."""
        account = ticket.account
        refused = account.take_tokens(expected.num_tokens, self._clock.monotonic())
        if refused is not None:
            return self._count(account.tenant.name, refused)
        ticket.expected = expected
        return None

    def correct_cached(self, ticket: Ticket, num_cached_tokens: int) -> None:
        """Replace the predicted cached tokens of a request by those that its worker found."""
        self._charge(ticket, replace(ticket.service, num_cached_tokens=num_cached_tokens))

    def settle(self, ticket: Ticket, actual: Service) -> None:
        """Replace the expected service of a request by the actual one. Call once, before its ticket is closed."""
        account = ticket.account
        account.correct_tokens(actual.num_tokens - ticket.expected.num_tokens, self._clock.monotonic())
        ticket.expected = actual
        self._charge(ticket, actual)
        self._metrics.count_service(account.tenant.name, actual)

    def _count(self, tenant: str, refused: Refused) -> Refused:
        self._metrics.count_refusal(tenant, refused.cause)
        self.num_refused += 1
        return refused

    def _close(self, ticket: Ticket) -> None:
        if ticket.is_closed:
            return
        ticket.is_closed = True
        account = ticket.account
        if not ticket.has_plan:
            if ticket.is_returned:
                account.num_returned -= 1
                self._num_unplanned -= 1
            elif account.waiting.pop(ticket.number, None) is not None:
                self._num_unplanned -= 1
            return
        account.num_active -= 1
        if not account.is_full:
            for lane in lanes_of(account.tenant.name):
                self._queue.release(lane)
            self._serve()

    def _account(self, tenant: Tenant, now_s: float) -> Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = open_account(tenant, now_s=now_s)
            yields = tenant.overload is Overload.YIELD
            for lane in lanes_of(tenant.name):
                self._queue.add_tenant(lane, weight=tenant.weight, yields=yields)
        return account

    # In line.

    async def place(self, queued: QueuedRequest) -> Booking:
        """Wait in line for a plan and return it booked. The caller releases the booking.

        Raises Overloaded when no worker can serve the request in time, when another tenant's request takes its place,
        and after its deadline; then WorkerLost instead when no worker of the pool that answers is ready.
        """
        queued.ticket.check_place()
        granted: asyncio.Future[Booking | Refused] = asyncio.get_running_loop().create_future()
        queued.granted, queued.refused_at, queued.refused_at_opening = granted, -1, -1
        place = self._stand(queued)
        queued.ticket.queued.add(queued)
        self._waits_for_workers = False
        self.num_queued_tokens += queued.search.request.num_tokens
        try:
            self._serve()
            if place.is_waiting:
                self._forecast(place)
            async with asyncio.timeout(queued.deadline_s - self._clock.monotonic()):
                outcome = await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled() and isinstance(booking := granted.result(), Booking):
                booking.release()
            if isinstance(error, TimeoutError):
                raise self._timeout_error(queued) from None
            raise
        finally:
            self.num_queued_tokens -= queued.search.request.num_tokens
            queued.ticket.queued.discard(queued)
            was_waiting = place.is_waiting
            self._queue.discard(place)
            if was_waiting:
                self._serve()  # requests behind it may be served now
        if isinstance(outcome, Refused):
            raise outcome.error()
        return outcome

    def _stand(self, queued: QueuedRequest) -> Place[QueuedRequest]:
        ticket = queued.ticket
        request = queued.search.request
        ticket.lane = lane_of(ticket.account.tenant.name, request)
        work_s = self._chooser.work_s(request)
        if queued.goes_first is None:
            queued.goes_first = ticket.has_plan
        if queued.goes_first:
            return self._queue.push_first(queued, number=ticket.number, work_s=work_s)
        if ticket.has_plan:
            self._take_back(ticket)
        has_objective = request.ttft_slo_s != math.inf
        due_s = ticket.received_s + (request.ttft_slo_s - work_s if has_objective else 0.0)
        key = rank(priority=ticket.terms.priority, work_s=work_s, due_s=due_s, number=ticket.number)
        late_s = due_s if has_objective else math.inf
        deadline_s = min(queued.deadline_s, request.deadline_s)
        return self._queue.push(
            queued,
            tenant=ticket.lane,
            rank=key,
            due_s=late_s,
            deadline_s=deadline_s,
            work_s=work_s,
        )

    def _forecast(self, place: Place[QueuedRequest]) -> None:
        """Forecast the first token of a newcomer that begins to wait, and tell it."""
        queued, search = place.item, place.item.search
        if queued.ticket.has_plan or queued.ticket.is_returned or search.request.has_begun:
            return
        before_s = self._queue.work_before_s(place, now_s=self._clock.monotonic())
        search.line_forecast = self._chooser.forecast_in_line(search.request, work_s=place.work_s, before_s=before_s)
        queued.on_waiting(search.line_forecast)

    def _take_back(self, ticket: Ticket) -> None:
        """Let a newcomer that a worker has refused wait as before its plan; no other request displaces it any more."""
        account = ticket.account
        ticket.has_plan, ticket.is_returned = False, True
        account.num_active -= 1
        account.num_returned += 1
        self._num_unplanned += 1
        if not account.is_full:
            for lane in lanes_of(account.tenant.name):
                self._queue.release(lane)

    def _on_change(self) -> None:
        self._num_changes += 1
        self._serve()

    def _serve(self) -> None:
        """Give out plans in order of the line, past requests for which there is none now."""
        passed: list[Place[QueuedRequest]] = []
        num_passed: Counter[str] = Counter()
        skipping = SkippedLanes()
        if not self.num_queued:
            return
        now_s = self._clock.monotonic()
        self._look(now_s)
        if self._waits_for_workers and self._opens_s > now_s:
            self._wake_at(self._opens_s)
            return
        while (place := self._queue.pop(now_s=now_s, skipping=skipping)) is not None:
            queued = place.item
            assert queued.granted is not None, f"{queued.search.request.request_id} is in line without a future"
            if queued.granted.done():  # cancelled: its task is leaving the line
                continue
            if place.is_late:
                queued.become_late()
            outcome = self._ask(queued)
            if isinstance(outcome, Booking):
                self._grant(queued, outcome)
                self._queue.grant(place, _cost(queued.ticket.service))
                self._look(now_s)
                for other in passed:
                    # A request that waits for a busy worker, or for another pool, loses nothing to those that go.
                    other.item.num_overtaken += _is_overtaken(other.item, by=queued)
            elif outcome.cause is RefusalCause.SLO and queued.on_late is not None:
                self._queue.restore_late(place)
            elif outcome.is_final:
                queued.granted.set_result(self._count(queued.ticket.account.tenant.name, outcome))
            else:
                passed.append(place)
                num_passed[place.tenant] += 1
                if outcome.cause is RefusalCause.SATURATED or queued.num_overtaken >= MAX_OVERTAKEN:
                    skipping.close(place)
                if num_passed[place.tenant] >= MAX_CANDIDATES:
                    skipping.lanes.add(place.tenant)
        for place in passed:
            self._queue.restore(place)
        self._waits_for_workers = bool(passed) and all(_is_busy(place.item) for place in passed)
        self._wake_at(min((self._wakes_at_s(place.item) for place in passed), default=math.inf))

    def _look(self, now_s: float) -> None:
        """Note whether some worker is free for another prompt."""
        self._opens_s = self._chooser.opens_at_s()
        was_open, self._is_open = self._is_open, self._opens_s <= now_s
        self._num_openings += self._is_open and not was_open

    def _ask(self, queued: QueuedRequest) -> Booking | Refused:
        if queued.last_refusal is not None and not self._is_worth_asking(queued, queued.last_refusal):
            return queued.last_refusal
        outcome = self._chooser.choose(queued.search)
        if isinstance(outcome, Refused):
            queued.last_refusal = outcome
            queued.refused_at, queued.refused_at_opening = self._num_changes, self._num_openings
            queued.ask_again_s = self._clock.monotonic() + max(outcome.retry_after_s, MIN_BUSY_S)
        return outcome

    def _is_worth_asking(self, queued: QueuedRequest, last: Refused) -> bool:
        now_s = self._clock.monotonic()
        if last.cause is RefusalCause.BUSY:
            if self._opens_s > now_s:
                return False
            if queued.refused_at_opening == self._num_openings and not self._chooser.may_differ(queued.search):
                return self._wakes_at_s(queued) <= now_s
        return queued.refused_at != self._num_changes or self._wakes_at_s(queued) <= now_s

    def _wakes_at_s(self, queued: QueuedRequest) -> float:
        """Return the time at which asking again can help although nothing has changed."""
        wakes_at_s = queued.search.wakes_at_s
        if not _is_busy(queued):
            return wakes_at_s
        # When a worker becomes free; or, if one is free and this request prefers another, when the other one is.
        return min(wakes_at_s, self._opens_s if self._opens_s > self._clock.monotonic() else queued.ask_again_s)

    def _grant(self, queued: QueuedRequest, booking: Booking) -> None:
        assert queued.granted is not None, "only a request in line is granted a plan"
        ticket, account = queued.ticket, queued.ticket.account
        if not ticket.has_plan:
            now_s = self._clock.monotonic()
            ticket.has_plan = True
            self._num_unplanned -= 1
            if ticket.is_returned:
                account.num_returned -= 1
            else:
                del account.waiting[ticket.number]
                self._pace.depart(now_s)
                account.pace.depart(now_s)
                self._metrics.observe_queue(account.tenant.name, now_s - ticket.received_s)
            account.num_active += 1
            request = queued.search.request
            expected = Service(
                num_prompt_tokens=request.num_tokens,
                num_cached_tokens=booking.plan.predicted_cached_tokens,
                num_output_tokens=request.num_output_tokens * request.num_samples,
                num_samples=request.num_samples,
            )
            self._charge(ticket, expected)
            if account.is_full:
                for lane in lanes_of(account.tenant.name):
                    self._queue.hold(lane)
        queued.granted.set_result(booking)

    def _charge(self, ticket: Ticket, service: Service) -> None:
        """Make `service` the whole charge of a request."""
        cost = _cost(service) - _cost(ticket.service)
        for lane in lanes_of(ticket.account.tenant.name):
            self._queue.charge(lane, cost * share_of(lane, ticket))
        ticket.service = service

    def _wake_at(self, wakes_at_s: float) -> None:
        """Serve the line again at this time, even when nothing changes before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wakes_at_s != math.inf:
            delay_s = max(wakes_at_s - self._clock.monotonic(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._serve)

    def _timeout_error(self, queued: QueuedRequest) -> Overloaded | WorkerLost:
        reason = queued.last_refusal.reason if queued.last_refusal is not None else "other requests are first in line"
        message = f"no plan in time: {reason}"
        if not self._fleet.can_answer(is_prefill_only=queued.search.request.is_prefill_only):
            return WorkerLost(message)
        self._metrics.count_refusal(queued.ticket.account.tenant.name, RefusalCause.NO_ROOM)
        return Overloaded(message, retry_after_s=self._pace.promise_s(self._clock.monotonic()))


def _is_overtaken(queued: QueuedRequest, *, by: QueuedRequest) -> bool:
    """Whether a plan for `by` takes something that a waiting request needs, too."""
    is_same_pool = queued.search.request.is_prefill_only is by.search.request.is_prefill_only
    return is_same_pool and not _is_busy(queued)


def _is_busy(queued: QueuedRequest) -> bool:
    return queued.last_refusal is not None and queued.last_refusal.cause is RefusalCause.BUSY


def _cost(service: Service) -> float:
    computed = service.num_prompt_tokens - service.num_cached_tokens
    return PROMPT_TOKEN_COST * computed + OUTPUT_TOKEN_COST * service.num_output_tokens
