"""Holds of plans on workers: booked with the choice, given back when the attempt ends."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from common.clock import Clock
from common.ids import WorkerId
from kvrelay.v1 import sequence_pb2
from router.fleet.decisions import Booking, DecisionRecord
from router.fleet.hold import Hold
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
        self._open: set[Booking] = set()
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
        decode = self._hold(plan.decode, request)
        decode.num_blocks = request.num_decode_blocks
        decode.num_growth_blocks = request.num_growth_blocks
        decode.num_decodes = request.num_decodes
        decode.num_context_tokens = request.num_decodes * request.num_tokens
        timing = decode.member.timing
        alone_s = timing.itl_s(decode.num_decodes, decode.num_context_tokens)
        if alone_s <= request.tpot_slo_s or not timing.token_gap.is_measured:  # an estimate gives no objective up
            decode.tpot_slo_s = request.tpot_slo_s
            decode.bounds_prompts = not self._has_prefill()
        prefill = None
        if plan.prefill is not None:
            prefill = self._hold(plan.prefill, request)
            prefill.num_blocks = request.num_prefill_blocks
        computes = decode if prefill is None else prefill
        computes.num_prompt_tokens = request.num_tokens
        computes.num_missing_tokens = request.num_tokens - plan.predicted_cached_tokens
        computes.prefill_s = (
            computes.member.timing.prefill_s(computes.num_missing_tokens, plan.predicted_cached_tokens)
            if plan.predicted_prefill_s is None
            else plan.predicted_prefill_s
        )
        for hold in (decode, prefill):
            if hold is not None:
                hold.member.add_hold(hold)
                if request.is_quarantined:
                    hold.is_quarantined = True
                    self._quarantine[hold.member.endpoint.worker_id] += 1
        source = None if plan.pull is None else self._source(plan.pull)
        if source is None and plan.pull is not None:
            plan = replace(plan, pull=None)
        decision = DecisionRecord(
            request_id=request.request_id,
            num_tokens=request.num_tokens,
            plan=plan,
            decided_s=self._clock.monotonic(),
        )
        booking = Booking(
            decision=decision,
            decode=decode,
            prefill=prefill,
            source=source,
            tenant=request.tenant,
            on_release=self._release,
        )
        self._open.add(booking)
        return booking

    def _source(self, pull: Pull) -> sequence_pb2.KvSource | None:
        """Return where to pull from, or None when the worker is no longer in use."""
        member = self._members.get(pull.source)
        if member is None or member.facts is None or member.state is not WorkerState.READY:
            return None
        return sequence_pb2.KvSource(
            worker_id=pull.source,
            address=member.kv_address,
            epoch=member.facts.epoch,
            num_blocks=pull.num_blocks,
        )

    def _hold(self, worker_id: WorkerId, request: PlacementRequest) -> Hold:
        member = self._members[worker_id]
        assert member.facts is not None, f"{worker_id} was chosen in state {member.state}"
        return Hold(
            member=member,
            epoch=member.facts.epoch,
            request_id=request.request_id,
            booked_s=self._clock.monotonic(),
            num_blocks=0,
        )

    def _release(self, booking: Booking) -> None:
        if booking not in self._open:
            return
        self._open.remove(booking)
        for hold in booking.holds:
            hold.member.remove_hold(hold)
            if hold.is_quarantined:
                self._quarantine -= Counter([hold.member.endpoint.worker_id])
        self._on_released(booking)
