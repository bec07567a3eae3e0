"""The line of one pool: which of the requests that it answers gets a plan next.

1. `place`: the request waits in line (fair_queue.py) until the chooser books a plan for it. Requests that lost a worker
   go before all newcomers, in order of arrival. A newcomer that a worker refused takes its former place again.
2. The line is served whenever the fleet changes, a request ends or an exclusion expires; there is no polling. When the
   next request finds no plan, a few of each tenant behind it may go ahead, until it has been overtaken MAX_OVERTAKEN
   times.
3. When the decode pool is full, tenants go in the order of what they have of it for their weight, and a request may
   have answers of tenants with more set back (claims.py). Those wait for another plan in their tenant's order.

A refused request is asked about again only when that may help (plan_finder.py). A refusal is final when waiting cannot
help (choosing/shedding.py).

Workers report many times a second, and while they are full hardly any report matters. So a search that refuses requests
is followed by a rest, the longer the more it has cost; whatever happens meanwhile, the next search comes at its end.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable

from common.clock import Clock
from common.errors import EngineFault, Overloaded, RefusalCause, Refused, WorkerLost
from router.choosing.chooser import Chooser
from router.fleet.booking import Booking
from router.fleet.fleet import Fleet
from router.line.admission import Admission, cost_of
from router.line.claims import Claims
from router.line.fair_queue import FIRST, FairQueue
from router.line.plan_finder import PlanFinder
from router.line.tenant_queue import rank
from router.line.wait import Retry, Standing, Wait
from router.placement.answer_pool import AnswerPool
from router.placement.waits import WaitingRequest
from router.record.account import Service

MAX_CANDIDATES = 4
"""Requests of each tenant that are tried when none before them found a plan."""
MAX_PASSED = 64
"""Requests of all tenants that are refused before the search ends; those that wait for one busy worker do not count."""
MAX_OVERTAKEN = 32
"""Plans that requests behind a waiting one may get before it."""
REST_KNOWN_S, REST_ASKED_S, MAX_REST_S = 0.0005, 0.0025, 0.05
"""Rest for each request that the last search has refused without asking the chooser, and for each about which it was
asked, and the longest: about ten times as long as the search takes."""


class PoolLine:
    """Requests that wait for a plan of one pool. Event loop only."""

    def __init__(
        self,
        pool: AnswerPool,
        *,
        admission: Admission,
        queue: FairQueue[Wait],
        chooser: Chooser,
        fleet: Fleet,
        clock: Clock,
    ) -> None:
        """`queue` is one of those that `admission` charges."""
        self._pool = pool
        self._admission = admission
        self._queue = queue
        self._chooser = chooser
        self._fleet = fleet
        self._clock = clock
        self.num_queued_tokens = 0
        """Tokens of the requests inside `place`."""
        self.num_again = 0
        """Those of them that have had a plan before."""
        self.granted_s = 0.0
        """Time of the last plan."""
        self._waits = admission.waits[pool]
        self._finder = PlanFinder(chooser, self._waits, clock)
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at_s = math.inf
        """Time of the timer, on the clock."""
        self._rests_until_s = 0.0
        self._claims = Claims(admission=admission, fleet=fleet, clock=clock)
        self._is_short = False
        """Whether the last search found no room in the decode pool for some request."""
        self.on_waiting: Callable[[Wait], None] = lambda _wait: None
        """Called with a request that begins to wait."""
        self._inside: dict[Wait, None] = {}
        """Requests inside `place`, in the order in which they came."""

    def waiting(self) -> list[WaitingRequest]:
        """Return the requests that wait now."""
        return [
            WaitingRequest(tenant=wait.tenant, waits=self._finder.waits(wait) - wait.waits_before)
            for wait in self._inside
        ]

    async def place(self, wait: Wait) -> Booking:
        """Wait in line for a plan and return it booked. The caller releases the booking.

        Raises Overloaded when no worker can serve the request in time, when another tenant's request takes its place,
        and after its deadline; then WorkerLost instead when no worker of the pool that answers is ready. Raises
        EngineFault when the policy fails.
        """
        wait.ticket.check_place()
        granted: asyncio.Future[Booking | Refused | EngineFault] = asyncio.get_running_loop().create_future()
        wait.granted, wait.retry = granted, None
        self._stand(wait)
        wait.waits_before = self._finder.waits(wait)
        had_plan = wait.ticket.has_plan
        wait.ticket.granted.add(granted)
        self.num_queued_tokens += wait.request.num_tokens
        self.num_again += had_plan
        self._inside[wait] = None
        try:
            self.serve()
            if wait.is_waiting:
                self._forecast(wait)
                self.on_waiting(wait)
            async with asyncio.timeout(wait.patience_ends_s - self._clock.monotonic()):
                outcome = await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled() and isinstance(booking := granted.result(), Booking):
                booking.release()
            if isinstance(error, TimeoutError):
                raise self._timeout_error(wait) from None
            raise
        finally:
            self.num_queued_tokens -= wait.request.num_tokens
            self.num_again -= had_plan
            del self._inside[wait]
            wait.ticket.granted.discard(granted)
            was_waiting = wait.is_waiting
            self._queue.discard(wait)
            if was_waiting:
                self.serve()  # requests behind it may be served now
        if isinstance(outcome, EngineFault):
            raise outcome
        if isinstance(outcome, Refused):
            raise outcome.error()
        return outcome

    def _stand(self, wait: Wait) -> None:
        ticket, request = wait.ticket, wait.request
        wait.work_s = self._chooser.work_s(request)
        if wait.standing is Standing.FIRST:
            wait.rank = (ticket.number,)
            self._queue.push_first(wait)
            return
        is_set_back = wait.standing is Standing.SET_BACK
        if ticket.has_plan and not is_set_back:
            self._admission.take_back(ticket)
        has_objective = request.ttft_slo_s != math.inf and not is_set_back
        due_s = ticket.received_s + (request.ttft_slo_s - wait.work_s if has_objective else 0.0)
        size_s = wait.work_s
        if has_objective:
            size_s = self._chooser.size_s(request, wait.work_s, answer_price=self._waits.answer_price)
        wait.rank = rank(priority=ticket.terms.priority, size_s=size_s, due_s=due_s, number=ticket.number)
        wait.due_s = due_s if has_objective else math.inf
        wait.deadline_s = min(wait.patience_ends_s, request.deadline_s)
        self._queue.push(wait, tenant=wait.tenant, is_spared=is_set_back)

    def _forecast(self, wait: Wait) -> None:
        """Forecast the first token of a newcomer that begins to wait, and report the forecast to it."""
        request = wait.request
        if wait.ticket.has_plan or wait.ticket.is_returned or request.has_begun:
            return
        before_s = self._queue.work_before_s(wait, now_s=self._clock.monotonic())
        num_ends = 0.0
        if self._waits.await_answers:
            num_ends = self._queue.num_before(before_s) + request.num_samples
        wait.line_forecast = self._chooser.forecast_in_line(
            request, work_s=wait.work_s, before_s=before_s, num_ends=num_ends
        )
        wait.on_waiting(wait.line_forecast)

    def on_change(self) -> None:
        """Serve the requests after a change of the fleet."""
        self._finder.num_changes += 1
        self.serve()

    def serve(self) -> None:
        """Search for plans, if requests wait; at the end of the rest if there is one."""
        now_s = self._clock.monotonic()
        if not self._inside:
            self._wake_at(math.inf)
        elif self._rests_until_s > now_s:
            self._wake_at(self._rests_until_s)
        else:
            self._wake_at(self._search(now_s))

    def _search(self, now_s: float) -> float:
        """Give out plans in order of the line, past requests for which there is none now.

        Returns the time at which another search can help although nothing has changed.
        """
        self._finder.look(now_s)
        if self._serve_claims():
            return self._claims.ends_s
        passed: dict[Wait, Retry] = {}
        num_passed: Counter[str] = Counter()
        num_refused, rest_s = 0, 0.0
        skipping: set[str] = set()
        share = self._claims.with_a_place if self._is_short else None
        self._is_short = False
        for wait in self._queue.round(now_s=now_s, skipping=skipping, share=share):
            if wait.is_settled:  # cancelled: its task is leaving the line
                continue
            if wait.is_late:
                wait.become_late()
            known = self._finder.known_refusal(wait)
            outcome = self._finder.ask(wait) if known is None else known
            if outcome is None:
                continue
            if isinstance(outcome, Booking):
                self._grant(wait, outcome)
                for other, retry in passed.items():
                    other.num_overtaken += not retry.is_busy  # one that waits for a busy worker loses nothing
            elif outcome.refused.cause is RefusalCause.SLO and wait.on_late is not None:
                self._queue.restore_late(wait)
            elif outcome.refused.is_final:
                wait.settle(self._admission.refuse(wait.tenant, outcome.refused))
            else:
                passed[wait] = outcome
                num_passed[wait.queue.name] += 1
                num_refused += not outcome.is_busy
                rest_s += REST_ASKED_S if known is None else REST_KNOWN_S
                lacks_room = outcome.lacks_room and self._pool is AnswerPool.DECODE
                self._is_short |= lacks_room
                has_claim = lacks_room and self._finder.is_open and self._claims.make(wait)
                wait.awaits_answer = self._finder.is_open and outcome.lacks_room and not has_claim
                if _has_waited_enough(wait) or num_refused >= MAX_PASSED:
                    break
                if outcome.refused.cause is RefusalCause.SATURATED and not has_claim:
                    if wait.standing is not Standing.FIRST:
                        break
                    skipping.add(FIRST)  # a tenant with less than its share may still claim room
                if num_passed[wait.queue.name] >= MAX_CANDIDATES:
                    skipping.add(wait.queue.name)
        for wait in passed:
            self._queue.restore(wait)
        wakes_at_s = min((self._claims.ends_s, *map(self._finder.wakes_at_s, passed.values())))
        if rest_s:
            self._rests_until_s = min(now_s + min(rest_s, MAX_REST_S), wakes_at_s)
        return wakes_at_s

    def _serve_claims(self) -> bool:
        """Give plans to the requests whose claims stand; returns whether one still waits for its room."""
        for wait in self._claims.standing():
            if isinstance(outcome := self._finder.ask(wait), Booking):
                self._queue.take(wait)
                self._grant(wait, outcome)
            elif outcome is not None and outcome.lacks_room:
                self._claims.renew(wait)
            else:
                self._claims.end(wait)
        return bool(self._claims.standing())

    def _grant(self, wait: Wait, booking: Booking) -> None:
        request = wait.request
        expected = Service(
            num_prompt_tokens=request.num_tokens,
            num_cached_tokens=booking.plan.predicted_cached_tokens,
            num_output_tokens=request.num_output_tokens * request.num_samples,
            num_samples=request.num_samples,
        )
        self._admission.give_plan(wait.ticket, expected)
        wait.settle(booking)
        self._queue.grant(wait, cost_of(wait.ticket.service))
        self.granted_s = self._clock.monotonic()
        self._claims.note_plan(request)
        self._finder.look(self.granted_s)

    def _wake_at(self, wakes_at_s: float) -> None:
        """Serve the line again at a time, even when nothing changes before."""
        if self._timer is not None and wakes_at_s == self._wakes_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wakes_at_s != math.inf:
            delay_s = max(wakes_at_s - self._clock.monotonic(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)
            self._wakes_at_s = wakes_at_s

    def _wake(self) -> None:
        self._timer = None
        self.serve()

    def _timeout_error(self, wait: Wait) -> Overloaded | WorkerLost:
        reason = "other requests are first in line" if wait.retry is None else wait.retry.refused.reason
        message = f"no plan in time: {reason}"
        if not self._fleet.can_answer(self._pool):
            return WorkerLost(message)
        refused = Refused(reason=message, retry_after_s=self._admission.promise_s(), cause=RefusalCause.NO_ROOM)
        return self._admission.refuse(wait.tenant, refused).error()


def _has_waited_enough(wait: Wait) -> bool:
    """Whether nothing may go ahead of a waiting request any more.

    One that workers have refused for what it asks of them alone waits for those, whatever others do meanwhile.
    """
    return wait.num_overtaken >= MAX_OVERTAKEN and not wait.exclusions
