"""The line: which admitted request gets a plan next.

1. `place`: the request waits in line (fair_queue.py) until the chooser books a plan for it. Requests that lost a worker
   go before all newcomers, in order of arrival. A newcomer that a worker refused takes its former place again.
2. The line is served whenever the fleet changes, a request ends or an exclusion expires; there is no polling. When the
   next request finds no plan, a few of each tenant behind it may go ahead, until it has been overtaken MAX_OVERTAKEN
   times. A tenant's embeddings, which another pool answers than its generations, stand in a lane of their own.
3. When the decode pool is full, tenants go in the order of what they have of it for their weight, and a request may
   have answers of tenants with more set back (claims.py). Those wait for another plan in a lane of their own.

A refused request is asked about again only when that may help (asking.py). A refusal is final when waiting cannot help
(choosing/shedding.py).

Workers report many times a second, and while they are full hardly any report matters. So a search that refuses requests
is followed by a rest, the longer the more it has cost; whatever happens meanwhile, the next search comes at its end.
Each of the two pools that answer has rests of its own.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Collection

from common.clock import Clock
from common.errors import EngineFault, Overloaded, RefusalCause, Refused, WorkerLost
from router.choosing.chooser import Chooser
from router.fleet.decisions import Booking
from router.fleet.fleet import Fleet
from router.line.admission import Admission, cost_of
from router.line.asking import Asker
from router.line.claims import Claims
from router.line.fair_queue import FIRST, FairQueue
from router.line.lanes import SkippedLanes, lane_of, set_back_lane_of
from router.line.tenant_queue import Place, rank
from router.placement.answer_pool import AnswerPool
from router.placement.waits import WaitingRequest
from router.record.account import Service
from router.record.ticket import QueuedRequest

MAX_CANDIDATES = 4
"""Requests of each tenant that are tried when none before them found a plan."""
MAX_PASSED = 64
"""Requests of all tenants that are refused before the search ends for the others that the same pool answers; those that
wait for one busy worker do not count."""
MAX_OVERTAKEN = 32
"""Plans that requests behind a waiting one may get before it."""
REST_KNOWN_S, REST_ASKED_S, MAX_REST_S = 0.0005, 0.0025, 0.05
"""Rest of a pool for each request that its last search has refused without asking the chooser, and for each about which
it was asked, and the longest: about ten times as long as the search takes."""


class Line:
    """Requests that wait for a plan. Event loop only."""

    def __init__(
        self,
        *,
        admission: Admission,
        queue: FairQueue[QueuedRequest],
        chooser: Chooser,
        fleet: Fleet,
        clock: Clock,
    ) -> None:
        """`queue` is the one that `admission` charges."""
        self.admission = admission
        self._queue = queue
        self._chooser = chooser
        self._fleet = fleet
        self._clock = clock
        self.num_queued_tokens = 0
        """Tokens of the queued requests whose size is known."""
        self._asker = Asker(chooser, admission.waits, clock)
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at_s = math.inf
        """Time of the timer, on the clock."""
        self._num_placed: Counter[AnswerPool] = Counter()
        """Requests inside `place`, by the pool that answers them, like the following."""
        self._num_again = 0
        """Those of them that have had a plan before."""
        self._rests_until_s = dict.fromkeys(AnswerPool, 0.0)
        self._claims = Claims(admission=admission, fleet=fleet, clock=clock)
        self._is_short = False
        """Whether the last search found no room in the decode pool for some request."""
        self._inside: dict[QueuedRequest, None] = {}
        """Requests inside `place`, in the order in which they came."""
        fleet.subscribe(self._on_change)
        admission.on_room = self._serve

    @property
    def num_queued(self) -> int:
        """Requests that wait for a plan, those that lost theirs included."""
        return self.admission.num_without_plan + self._num_again

    @property
    def num_in_line(self) -> int:
        """Places in the line; a request whose samples are served separately has several."""
        return len(self._queue)

    def waiting(self) -> list[WaitingRequest]:
        """Return the requests that wait now."""
        return [
            WaitingRequest(
                tenant=queued.ticket.account.tenant.name, waits=self._asker.waits(queued) - queued.waits_before
            )
            for queued in self._inside
        ]

    async def place(self, queued: QueuedRequest) -> Booking:
        """Wait in line for a plan and return it booked. The caller releases the booking.

        Raises Overloaded when no worker can serve the request in time, when another tenant's request takes its place,
        and after its deadline; then WorkerLost instead when no worker of the pool that answers is ready. Raises
        EngineFault when the policy fails.
        """
        queued.ticket.check_place()
        granted: asyncio.Future[Booking | Refused | EngineFault] = asyncio.get_running_loop().create_future()
        queued.granted, queued.last_refusal = granted, None
        place = self._stand(queued)
        queued.waits_before = self._asker.waits(queued)
        had_plan = queued.ticket.has_plan
        queued.ticket.queued.add(queued)
        pool = queued.search.request.pool
        self.num_queued_tokens += queued.search.request.num_tokens
        self._num_placed[pool] += 1
        self._num_again += had_plan
        self._inside[queued] = None
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
            self._num_placed[pool] -= 1
            self._num_again -= had_plan
            del self._inside[queued]
            queued.ticket.queued.discard(queued)
            was_waiting = place.is_waiting
            self._queue.discard(place)
            if was_waiting:
                self._serve()  # requests behind it may be served now
        if isinstance(outcome, EngineFault):
            raise outcome
        if isinstance(outcome, Refused):
            raise outcome.error()
        return outcome

    def _stand(self, queued: QueuedRequest) -> Place[QueuedRequest]:
        ticket = queued.ticket
        request = queued.search.request
        ticket.lane = lane_of(ticket.account.tenant.name, request)
        work_s = self._chooser.work_s(request)
        if queued.goes_first is None:
            queued.goes_first = ticket.has_plan and not queued.is_set_back
        if queued.goes_first:
            return self._queue.push_first(queued, number=ticket.number, work_s=work_s)
        if ticket.has_plan and not queued.is_set_back:
            self.admission.take_back(ticket)
        has_objective = request.ttft_slo_s != math.inf and not queued.is_set_back
        due_s = ticket.received_s + (request.ttft_slo_s - work_s if has_objective else 0.0)
        key = rank(priority=ticket.terms.priority, work_s=work_s, due_s=due_s, number=ticket.number)
        late_s = due_s if has_objective else math.inf
        deadline_s = min(queued.deadline_s, request.deadline_s)
        return self._queue.push(
            queued,
            tenant=set_back_lane_of(ticket.account.tenant.name) if queued.is_set_back else ticket.lane,
            rank=key,
            due_s=late_s,
            deadline_s=deadline_s,
            work_s=work_s,
        )

    def _forecast(self, place: Place[QueuedRequest]) -> None:
        """Forecast the first token of a newcomer that begins to wait, and report the forecast to it."""
        queued, search = place.item, place.item.search
        request = search.request
        if queued.ticket.has_plan or queued.ticket.is_returned or request.has_begun:
            return
        before_s = self._queue.work_before_s(place, now_s=self._clock.monotonic())
        num_ends = 0.0
        if self.admission.waits[request.pool].await_answers:
            num_ends = self._queue.num_before(before_s) + request.num_samples
        search.line_forecast = self._chooser.forecast_in_line(
            request, work_s=place.work_s, before_s=before_s, num_ends=num_ends
        )
        queued.on_waiting(search.line_forecast)

    def _on_change(self) -> None:
        self._asker.num_changes += 1
        self._serve()

    def _serve(self) -> None:
        """Search for plans, for each pool for which requests wait; at the end of its rest if it has one."""
        now_s = self._clock.monotonic()
        waiting = [pool for pool, num_placed in self._num_placed.items() if num_placed]
        resting = [pool for pool in waiting if self._rests_until_s[pool] > now_s]
        wakes_at_s = self._search(now_s, resting) if len(resting) < len(waiting) else math.inf
        self._wake_at(min((self._rests_until_s[pool] for pool in resting), default=math.inf), wakes_at_s)

    def _search(self, now_s: float, resting: Collection[AnswerPool]) -> float:
        """Give out plans in order of the line, past requests for which there is none now.

        Returns the time at which another search can help although nothing has changed.
        """
        passed: list[Place[QueuedRequest]] = []
        num_passed: Counter[str] = Counter()
        num_refused: Counter[AnswerPool] = Counter()
        rests_s: defaultdict[AnswerPool, float] = defaultdict(float)
        skipping = SkippedLanes()
        for pool in resting:
            skipping.close_pool(pool)
        self._asker.look(now_s)
        is_claimed = self._serve_claims()
        if is_claimed:
            skipping.close_pool(AnswerPool.DECODE)
            skipping.lanes.add(FIRST)
        share = self._claims.with_a_place if self._is_short else None
        self._is_short &= is_claimed or AnswerPool.DECODE in resting
        for place in self._queue.round(now_s=now_s, skipping=skipping, share=share):
            queued = place.item
            if queued.is_settled:  # cancelled: its task is leaving the line
                continue
            if place.is_late:
                queued.become_late()
            known = self._asker.known_refusal(queued)
            outcome = self._asker.ask(queued) if known is None else known
            if outcome is None:
                continue
            if isinstance(outcome, Booking):
                self._grant(place, outcome)
                for other in passed:
                    # A request that waits for a busy worker, or for another pool, loses nothing to those that go.
                    other.item.num_overtaken += _is_overtaken(other.item, by=queued)
            elif outcome.cause is RefusalCause.SLO and queued.on_late is not None:
                self._queue.restore_late(place)
            elif outcome.is_final:
                queued.settle(self.admission.refuse(queued.ticket.account.tenant.name, outcome))
            else:
                passed.append(place)
                num_passed[place.tenant] += 1
                pool = queued.search.request.pool
                num_refused[pool] += not queued.is_busy
                rests_s[pool] += REST_ASKED_S if known is None else REST_KNOWN_S
                self._is_short |= queued.lacks_room and pool is AnswerPool.DECODE
                has_claim = self._asker.is_open and self._claims.make(place)
                queued.search.awaits_answer = self._asker.is_open and queued.lacks_room and not has_claim
                if _has_waited_enough(queued) or num_refused[pool] >= MAX_PASSED:
                    skipping.close(place)
                elif outcome.cause is RefusalCause.SATURATED and not has_claim:
                    if place.tenant == FIRST:  # a tenant with less than its share may still claim room
                        skipping.lanes.add(FIRST)
                    else:
                        skipping.close(place)
                if num_passed[place.tenant] >= MAX_CANDIDATES:
                    skipping.lanes.add(place.tenant)
        for place in passed:
            self._queue.restore(place)
        wakes_at_s = min((self._asker.wakes_at_s(place.item) for place in passed), default=math.inf)
        wakes_at_s = min(wakes_at_s, self._claims.ends_s)
        for pool, rest_s in rests_s.items():
            if pool not in resting:  # requests before all newcomers are tried all the same, and prolong no rest
                self._rests_until_s[pool] = min(now_s + min(rest_s, MAX_REST_S), wakes_at_s)
        return wakes_at_s

    def _serve_claims(self) -> bool:
        """Give plans to the requests whose claims stand; returns whether one still waits for its room."""
        for place in self._claims.standing():
            if isinstance(outcome := self._asker.ask(place.item), Booking):
                self._queue.take(place)
                self._grant(place, outcome)
            elif place.item.lacks_room and outcome is not None:
                self._claims.renew(place)
            else:
                self._claims.end(place)
        return bool(self._claims.standing())

    def _grant(self, place: Place[QueuedRequest], booking: Booking) -> None:
        queued, request = place.item, place.item.search.request
        expected = Service(
            num_prompt_tokens=request.num_tokens,
            num_cached_tokens=booking.plan.predicted_cached_tokens,
            num_output_tokens=request.num_output_tokens * request.num_samples,
            num_samples=request.num_samples,
        )
        self.admission.give_plan(queued.ticket, expected)
        queued.settle(booking)
        self._queue.grant(place, cost_of(queued.ticket.service))
        self._claims.note_plan(request)
        self._asker.look(self._clock.monotonic())

    def _wake_at(self, *times_s: float) -> None:
        """Serve the line again at the first of these times, even when nothing changes before."""
        wakes_at_s = min(times_s)
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
        self._serve()

    def _timeout_error(self, queued: QueuedRequest) -> Overloaded | WorkerLost:
        reason = queued.last_refusal.reason if queued.last_refusal is not None else "other requests are first in line"
        message = f"no plan in time: {reason}"
        if not self._fleet.can_answer(queued.search.request.pool):
            return WorkerLost(message)
        refused = Refused(reason=message, retry_after_s=self.admission.promise_s(), cause=RefusalCause.NO_ROOM)
        return self.admission.refuse(queued.ticket.account.tenant.name, refused).error()


def _has_waited_enough(queued: QueuedRequest) -> bool:
    """Whether nothing may go ahead of a waiting request any more.

    One that workers have refused for what it asks of them alone waits for those, whatever others do meanwhile.
    """
    return queued.num_overtaken >= MAX_OVERTAKEN and not queued.search.exclusions


def _is_overtaken(queued: QueuedRequest, *, by: QueuedRequest) -> bool:
    """Whether a plan for `by` takes something that a waiting request needs, too."""
    is_same_pool = queued.search.request.pool is by.search.request.pool
    return is_same_pool and not queued.is_busy
