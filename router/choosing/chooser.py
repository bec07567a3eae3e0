"""The one place where a plan is chosen and booked, in one step.

1. Workers that refused this search are left out (`Search.exclusions`), and for a quarantined request
   (crash_budget.py) those that have one already.
2. The index returns the holders of the prefix and the policy chooses. The matches of the chosen workers are verified by
   one walk; when the index promised too much, the policy chooses again.
3. A request that no worker can serve in time is refused for good (shedding.py).
4. The plan is booked. Its blocks count as cached where they are computed until events confirm them or EXPECTED_TTL_S
   passes; a failed attempt takes them back (`expecting`).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from common.block_hash import BlockHashes
from common.clock import Clock
from common.errors import Refused
from common.ids import WorkerId
from router.choosing.forecasts import Forecaster
from router.choosing.shedding import Shed, find_hopeless
from router.fleet.booking import Booking, WorkerBooking
from router.fleet.decisions import DecisionLog
from router.fleet.fleet import Fleet
from router.fleet.hot_prefixes import HotPrefixes
from router.fleet.index import PrefixIndex
from router.fleet.lives import Life
from router.fleet.prefix_match import PrefixMatches
from router.placement.answer_pool import AnswerPool
from router.placement.calibration import DurationForecast
from router.placement.loads import ProjectedLoad
from router.placement.plans import FleetView, NoRoom, PlacementRequest, Plan, Policy, TooSlow

EXPECTED_TTL_S = 30.0
"""How long blocks that a plan will produce count as cached without an event from the worker."""
RETRY_AFTER_S = 1.0
"""Pause for a worker that refused without naming a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A worker that refused the search; it is not asked again before its load changes or the time has come."""

    load_version: int
    until_s: float


class Search(Protocol):
    """What the choice of a plan reads of a request that waits for one (`router.line.wait.Wait`)."""

    request: PlacementRequest
    shed: Shed
    exclusions: dict[WorkerId, Exclusion]
    """Workers that have refused it."""
    failed_pairs: Collection[tuple[Life, Life]]
    """Prefill and decode workers that lost the request together and live on: the network between them may be cut. They
    are chosen again only when no other plan is possible."""
    line_forecast: DurationForecast | None
    """Forecast of the time to first token made when the request entered the line."""
    awaits_answer: bool
    """Whether it may not have a running answer set back for it, so that one has to end first (line/claims.py)."""


class Chooser:
    """Chooses and books. Event loop only."""

    def __init__(
        self, *, fleet: Fleet, index: PrefixIndex, policy: Policy, clock: Clock, max_wait_s: float = 0.0
    ) -> None:
        self._max_wait_s = max_wait_s
        self._fleet = fleet
        self._index = index
        self._policy = policy
        self._clock = clock
        self.decisions = DecisionLog()
        self.hot_prefixes = HotPrefixes(clock, index.match)
        self.forecaster = Forecaster()
        self.decisions.subscribe(self.forecaster.learn)

    def choose(self, search: Search) -> Booking | Refused:
        """Return a booked plan, or why there is none now. The caller releases the booking."""
        now_s = self._clock.monotonic()
        self._index.expire(now_s)
        search.exclusions = {
            worker_id: exclusion
            for worker_id, exclusion in search.exclusions.items()
            if exclusion.until_s > now_s and exclusion.load_version == self._fleet.load_version(worker_id)
        }
        excluded: Collection[WorkerId] = search.exclusions.keys()
        if search.request.is_quarantined:
            excluded = {*excluded, *self._fleet.bookings.quarantine}
        view = self._fleet.view(search.request.pool, excluded=excluded)
        matches = self._index.match(search.request.hashes, num_usable=search.request.num_usable_blocks)
        request = replace(
            search.request,
            now_s=now_s,
            cached_blocks=matches,
            longest_holders=matches.longest_holders,
            count_present=matches.count_present,
            num_in_pages=matches.num_in_pages if self._index.has_tiers else None,
            gap_error=self.forecaster.gap_error(),
        )
        plan = self._plan(request, view, matches)
        if search.failed_pairs:
            plan = self._with_another_pair(plan, search, request, matches, excluded=excluded)
        if not excluded:
            error = self.forecaster.ttft_error(plan)
            place_s = 0.0
            if search.awaits_answer and isinstance(plan, NoRoom | TooSlow):
                place_s = view.decode.answer_ends_in_s()
            hopeless = find_hopeless(request, plan, view, shed=search.shed, error=error, place_s=place_s)
            if hopeless is not None:
                return hopeless
        if isinstance(plan, Refused):
            return plan
        if request.pool is AnswerPool.PREFILL:
            plan = replace(plan, pool=request.pool, predicted_tpot_s=None)
        return self._book(search, request, plan, matches)

    def _plan(self, request: PlacementRequest, view: FleetView, matches: PrefixMatches) -> Plan | Refused:
        """Return the policy's choice, made with exact matches of the chosen workers."""
        plan = self._policy.choose(request, view)
        while isinstance(plan, Plan) and not _verify(matches, plan):
            plan = self._policy.choose(request, view)
        return plan

    def _with_another_pair(
        self,
        first: Plan | Refused,
        search: Search,
        request: PlacementRequest,
        matches: PrefixMatches,
        *,
        excluded: Collection[WorkerId],
    ) -> Plan | Refused:
        """Return the best plan that pairs no workers which failed together; `first` when there is none."""
        plan, without = first, set(excluded)
        while isinstance(plan, Plan) and self._lives(plan) in search.failed_pairs:
            without.add(plan.computes)
            plan = self._plan(request, self._fleet.view(request.pool, excluded=without), matches)
        return plan if isinstance(plan, Plan) else first

    def _lives(self, plan: Plan) -> tuple[Life | None, Life | None]:
        """Return the lives of the prefill and the decode worker as they are now."""
        lives = self._fleet.lives
        return None if plan.prefill is None else lives.of(plan.prefill), lives.of(plan.answering)

    def has_changed(self, worker: ProjectedLoad) -> bool:
        """Return whether the load of a worker is another one now."""
        return self._fleet.roster.load(worker.worker_id) is not worker

    def may_hold(self, request: PlacementRequest) -> bool:
        """Return False when no worker that answers such requests has room for it."""
        return self._fleet.roster.may_hold(request)

    def opens_at_s(self) -> float:
        """Return the predicted time at which some worker's prefill wait is short enough for another prompt."""
        return self._fleet.roster.prefill_free_at_s() - self._max_wait_s

    def work_s(self, request: PlacementRequest) -> float:
        """Return how long a typical worker computes the prompt with the longest prefix that any worker holds."""
        matches = self._index.match(request.hashes, num_usable=request.num_usable_blocks)
        num_cached_blocks = min(matches.longest, request.num_usable_blocks)
        num_cached_tokens = num_cached_blocks * request.block_size
        return self._fleet.roster.typical_timing.prefill_s(request.num_tokens - num_cached_tokens, num_cached_tokens)

    def size_s(self, request: PlacementRequest, work_s: float, *, answer_price: float) -> float:
        """Return what a request costs both pools; see `Roster.size_s`."""
        return self._fleet.roster.size_s(request, work_s, answer_price=answer_price)

    def forecast_in_line(
        self, request: PlacementRequest, *, work_s: float, before_s: float, num_ends: float
    ) -> DurationForecast | None:
        """Return the time to first token of a request that waits behind `before_s` of work; None without any worker.

        The workers share the work before it, and, of the requests that come meanwhile, as much as its own: shorter ones
        overtake it, and the longer it computes, the more do. It also waits until `num_ends` answers have ended.
        """
        roster, now_s = self._fleet.roster, self._clock.monotonic()
        num_workers = len(roster.prefill or roster.decode)
        if not num_workers:
            return None
        wait_s = max(0.0, roster.prefill_free_at_s() - now_s) + (before_s + work_s) / num_workers
        wait_s = max(wait_s, num_ends * roster.decode.answer_ends_in_s())
        return self.forecaster.in_line(wait_s + work_s, passed_s=now_s - request.received_s)

    def exclude(self, search: Search, refusing: WorkerBooking, *, retry_after_s: float | None) -> None:
        """Leave a worker that refused a booking out until its load changes or the time has passed."""
        search.exclusions[refusing.member.endpoint.worker_id] = Exclusion(
            # As of the choice: a change between choice and refusal is a reason to try again at once.
            load_version=refusing.load_version,
            until_s=self._clock.monotonic() + (RETRY_AFTER_S if retry_after_s is None else retry_after_s),
        )

    def expect(self, worker_id: WorkerId, hashes: BlockHashes) -> None:
        """Count blocks as cached on a worker before its events arrive, so that the next request does not race them."""
        self._index.expect(worker_id, hashes, expires_s=self._clock.monotonic() + EXPECTED_TTL_S)

    def retract(self, booking: Booking) -> None:
        """Forget the blocks that a booked plan would have produced and that no event has confirmed.

        A sibling that expects the same blocks there loses its expectation, too: events bring them soon enough, and
        promising too little costs less than promising too much.
        """
        self._index.retract(booking.plan.computes, booking.hashes)

    @contextmanager
    def expecting(self, booking: Booking) -> Iterator[None]:
        """Run a plan inside the block; `retract` its blocks when that fails."""
        try:
            yield
        except BaseException:
            self.retract(booking)
            raise

    def _book(self, search: Search, request: PlacementRequest, plan: Plan, matches: PrefixMatches) -> Booking:
        """Return the plan booked, and log the decision."""
        booking = self._fleet.bookings.book(plan, request)
        decision = booking.decision
        decision.line_forecast = search.line_forecast
        decision.ttft_forecast, decision.tpot_forecast = self.forecaster.ttft(request, plan), self.forecaster.tpot(plan)
        # Only where they are computed: a sibling may queue behind them there, but before the blocks have arrived at the
        # decode worker of a remote plan, a local plan there would compute them again.
        self.expect(plan.computes, request.hashes)
        decision.num_held_blocks, num_held = matches.count_held(plan.computes), matches.longest_held
        decision.num_evicted_blocks = self._index.evicted.count_leading(request.hashes.keys, start=num_held)
        self.hot_prefixes.note(request.hashes, min(num_held + decision.num_evicted_blocks, len(request.hashes)))
        decision.decision_s = self._clock.monotonic() - request.now_s
        self.decisions.add(decision)
        return booking


def _verify(matches: PrefixMatches, plan: Plan) -> bool:
    """Make the matches of the chosen workers exact and return whether they were."""
    chosen = {plan.answering, plan.computes}
    return all(matches.verify(worker_id) for worker_id in chosen)
