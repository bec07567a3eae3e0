"""Plans that are booked: with the choice, until the attempt ends."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from common.clock import Clock
from common.ids import WorkerId
from router.fleet.booking import Booking, WorkerBooking
from router.fleet.decisions import DecisionRecord
from router.fleet.member import Member, WorkerState
from router.placement.plans import PlacementRequest, Plan, Pull


class Bookings:
    """The bookings of a fleet that are not released yet. Event loop only."""

    def __init__(
        self,
        *,
        members: Mapping[WorkerId, Member],
        clock: Clock,
        has_prefill: Callable[[], bool],
        on_released: Callable[[Booking], None],
    ) -> None:
        """`members` is the membership, which changes; `has_prefill` returns whether a prefill worker is ready."""
        self._members = members
        self._clock = clock
        self._has_prefill = has_prefill
        self._on_released = on_released
        self._open: dict[Booking, None] = {}
        """In the order in which they were made: what is counted over them is the same each time."""
        self._quarantine: Counter[WorkerId] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Booking]:
        return iter(self._open)

    @property
    def quarantine(self) -> Collection[WorkerId]:
        """Workers with a quarantined request."""
        return self._quarantine.keys()

    def book(self, plan: Plan, request: PlacementRequest) -> Booking:
        """Count the plan as load of its workers until the booking is released."""
        answering = self._on_worker(plan.answering, request)
        answering.num_blocks = request.num_decode_blocks
        answering.num_growth_blocks = request.num_growth_blocks
        answering.num_decodes = request.num_decodes
        answering.num_context_tokens = request.num_decodes * request.num_tokens
        timing = answering.member.timing
        alone_s = timing.itl_s(answering.num_decodes, answering.num_context_tokens)
        if alone_s <= request.tpot_slo_s or not timing.token_gap.is_measured:  # an estimate gives no objective up
            answering.tpot_slo_s = request.tpot_slo_s
            answering.bounds_prompts = not self._has_prefill()
        prefill = None
        if plan.prefill is not None:
            prefill = self._on_worker(plan.prefill, request)
            prefill.num_blocks = request.num_prefill_blocks
        computes = answering if prefill is None else prefill
        computes.num_prompt_tokens = request.num_tokens
        computes.num_missing_tokens = request.num_tokens - plan.predicted_cached_tokens
        computes.prefill_s = (
            computes.member.timing.prefill_s(computes.num_missing_tokens, plan.predicted_cached_tokens)
            if plan.predicted_prefill_s is None
            else plan.predicted_prefill_s
        )
        for part in (answering, prefill):
            if part is not None:
                part.member.add_booking(part)
                if request.is_quarantined:
                    part.is_quarantined = True
                    self._quarantine[part.member.endpoint.worker_id] += 1
        source = None if plan.pull is None else self._source(plan.pull)
        if source is None and plan.pull is not None:
            plan = replace(plan, pull=None)
        decided_s = self._clock.monotonic()
        for worker_id, num_blocks in plan.tier_reads.items():
            if worker_id == plan.computes or source is not None:
                self._members[worker_id].add_tier_read(num_blocks, now_s=decided_s)
        decision = DecisionRecord(
            request_id=request.request_id,
            tenant=request.tenant.name,
            num_tokens=request.num_tokens,
            num_hashed_blocks=len(request.hashes),
            plan=plan,
            decided_s=decided_s,
            waited_s=decided_s - request.received_s,
        )
        booking = Booking(
            decision=decision,
            answering=answering,
            prefill=prefill,
            source=source,
            hashes=request.hashes,
            tenant=request.tenant,
            on_release=self._release,
        )
        self._open[booking] = None
        return booking

    def _source(self, pull: Pull) -> Member | None:
        """Return where to pull from, or None when the worker is no longer in use."""
        member = self._members.get(pull.source)
        return member if member is not None and member.state is WorkerState.READY else None

    def _on_worker(self, worker_id: WorkerId, request: PlacementRequest) -> WorkerBooking:
        member = self._members[worker_id]
        assert member.facts is not None, f"{worker_id} was chosen in state {member.state}"
        return WorkerBooking(
            member=member,
            epoch=member.facts.epoch,
            request_id=request.request_id,
            booked_s=self._clock.monotonic(),
            load_version=member.load_version,
            num_blocks=0,
        )

    def _release(self, booking: Booking) -> None:
        if booking not in self._open:
            return
        del self._open[booking]
        for part in booking.on_workers:
            part.member.remove_booking(part)
            if part.is_quarantined:
                self._quarantine -= Counter([part.member.endpoint.worker_id])
        self._on_released(booking)
