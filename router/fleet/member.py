"""One worker as the router sees it: its state, its last report, and the bookings since."""

import enum
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from common.ports import with_port
from common.timing import GUESSED_TIMING, TimingModel
from kvrelay.v1 import worker_pb2
from router.fleet.booking import BookingSums, WorkerBooking
from router.fleet.facts import WorkerEndpoint, WorkerFacts
from router.fleet.lives import AttemptCounts, Life
from router.fleet.worker_client import WorkerClient
from router.placement.loads import ProjectedLoad

SETTLE_S = 1.0
"""A report this long after a booking counts as including it, in case the update that says so was lost."""
GAP_HALF_LIFE_S = 60.0
MAX_GAP_S = 2.0
"""Longer gaps between two reports count as this long: a worker that stood still once is not slow for good."""


class WorkerState(enum.Enum):
    """Whether and why a worker can be used."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """A worker of the membership.

    The fleet changes its state and facts, `PoolTiming` its models of speed; bookings and attempts change its bookings.
    """

    endpoint: WorkerEndpoint
    client: WorkerClient
    direct_name: str = ""
    """DNS name in the certificate of its direct door; empty: the host of its address."""
    state: WorkerState = WorkerState.CONNECTING
    why: str = ""
    """Reason of a refused or lost state."""
    is_silent: bool = False
    """It was lost, and nothing came from it before: its process may still live."""
    attempts: AttemptCounts = field(default_factory=AttemptCounts)
    """Counts of the attempts on the present life."""
    is_set_to_drain: bool = False
    """The membership says that the worker is leaving."""
    is_leaving: bool = False
    """The worker itself says that it is leaving."""
    facts: WorkerFacts | None = None
    """Facts of its last known life."""
    report: worker_pb2.LoadReport = field(default_factory=worker_pb2.LoadReport)
    reported_s: float = 0.0
    """Arrival time of the report."""
    usual_gap_s: float = 0.0
    """Longest recent time between two reports of a subscription: it halves every GAP_HALF_LIFE_S."""
    stored_s: float = 0.0
    """Time of the last event about stored blocks."""
    timing: TimingModel = GUESSED_TIMING
    """Model of its speed that the router uses."""
    reported_timing: TimingModel | None = None
    """Model that the present life has reported."""
    load_version: int = 0
    """Number of reports that differed from the previous one."""
    bookings: dict[WorkerBooking, None] = field(default_factory=dict)
    """Bookings on the present life, in order."""
    unreported: dict[WorkerBooking, None] = field(default_factory=dict)
    """Bookings that the last report does not include yet, in order."""
    num_users: int = 0
    """Bookings on any life for which the worker still has work; their calls use the channel."""
    changed: "set[Member]" = field(default_factory=set)
    """Members whose load has changed since the last look; the fleet's members share one set."""
    tier_free_at_s: float = 0.0
    """Predicted end of the booked reads from its tiers, of which it makes one at a time. One that is not made after all
    counts until its time has passed."""
    _active: BookingSums = field(default_factory=BookingSums)
    """Sums over `bookings`, so that computing a load costs only the unreported ones."""
    _load: ProjectedLoad | None = None
    """Load as of the last change."""

    @property
    def kv_address(self) -> str:
        """host:port where other workers pull from it."""
        return with_port(self.endpoint.address, 0 if self.facts is None else self.facts.kv_port)

    @property
    def direct_address(self) -> str:
        """host:port where clients stream their tokens."""
        return with_port(self.endpoint.address, 0 if self.facts is None else self.facts.direct_port)

    @property
    def life(self) -> Life | None:
        """Its last known life."""
        return None if self.facts is None else (self.endpoint.worker_id, self.facts.epoch)

    @property
    def has_ended(self) -> bool | None:
        """Whether its last known life is over; None while it is asked. A silent one may still live."""
        if self.state is WorkerState.CONNECTING:
            return None
        return self.state is not WorkerState.READY and not self.is_silent

    @property
    def is_accepted(self) -> bool:
        """Whether its facts were accepted and still booking."""
        return self.facts is not None and self.state in (WorkerState.READY, WorkerState.CONNECTING)

    @property
    def is_draining(self) -> bool:
        """Whether the worker is leaving."""
        return self.is_set_to_drain or self.is_leaving

    @property
    def may_begin(self) -> bool:
        """Whether it may be given something new to do."""
        return self.state is WorkerState.READY and not self.is_draining

    @property
    def state_text(self) -> str:
        """The state, with the reason of a refusal."""
        return f"refused: {self.why}" if self.state is WorkerState.REFUSED else self.state_name

    @property
    def state_name(self) -> str:
        """The state in one word."""
        return "draining" if self.is_draining and self.state is WorkerState.READY else self.state.value

    def add_booking(self, booking: WorkerBooking) -> None:
        """Count a booking."""
        self.bookings[booking] = self.unreported[booking] = None
        self._active.count(booking, 1)
        self.num_users += 1
        self._touch()

    def add_tier_read(self, num_blocks: int, *, now_s: float) -> None:
        """Count blocks that it will read from its tiers, after those before them."""
        assert self.facts is not None, f"{self.endpoint.worker_id} reads in state {self.state}"
        read_s = self.timing.tier_read_s(num_blocks * self.facts.block_bytes)
        self.tier_free_at_s = max(self.tier_free_at_s, now_s) + read_s
        self._touch()

    def remove_booking(self, booking: WorkerBooking) -> None:
        """Forget a booking on any life."""
        if booking in self.bookings:
            del self.bookings[booking]
            self._active.count(booking, -1)
        self.unreported.pop(booking, None)
        self._touch()
        self.end_use(booking)

    def end_use(self, booking: WorkerBooking) -> None:
        """Note that the worker's part of a booking is done; it still counts as load. Harmless when repeated."""
        if not booking.has_left:
            booking.has_left = True
            self.num_users -= 1
            assert self.num_users >= 0, f"{self.endpoint.worker_id}: num_users {self.num_users}"

    def begin_life(self, facts: WorkerFacts) -> None:
        """Take over the facts of an accepted worker; a new epoch voids the bookings on the old one."""
        if self.facts is None or self.facts.epoch != facts.epoch:
            self.bookings.clear()
            self.unreported.clear()
            self._active = BookingSums()
            self.reported_timing = None
            self.tier_free_at_s = 0.0
            self.attempts = AttemptCounts()
            self.is_leaving = False
        self.facts = facts
        self.is_silent = False
        self._touch()

    def take_report(
        self,
        report: worker_pb2.LoadReport,
        accepted: Collection[str] = (),
        *,
        now_s: float,
        is_next: bool = False,
    ) -> None:
        """Remember a load report; the bookings that it includes no longer count on top of it.

        `accepted` has one entry for each request that this report includes and the previous one did not; `is_next` says
        that this is not the first report of a subscription.
        """
        if report != self.report:
            self.report = report
            self.load_version += 1
        gap_s = now_s - self.reported_s
        usual_gap_s = self.usual_gap_s * 0.5 ** (gap_s / GAP_HALF_LIFE_S)
        self.usual_gap_s = max(usual_gap_s, min(gap_s, MAX_GAP_S)) if is_next else usual_gap_s
        self.reported_s = now_s
        self._touch()
        if not self.unreported:
            return
        num_accepted = Counter(accepted)
        for booking in list(self.unreported):
            if num_accepted[booking.request_id] > 0:
                num_accepted[booking.request_id] -= 1
            elif now_s - booking.booked_s < SETTLE_S:
                continue
            del self.unreported[booking]

    def take_timing(self, timing: TimingModel) -> None:
        """Use a new model of the worker's speed."""
        self.timing = timing
        self._touch()

    def note_prefilled(self, booking: WorkerBooking) -> None:
        """Note the first token of a booking. Harmless when repeated."""
        if booking in self.bookings and not booking.is_prefilled:
            self._active.count(booking, -1)
            booking.is_prefilled = True
            self._active.count(booking, 1)
            self._touch()

    def _touch(self) -> None:
        self._load = None
        self.changed.add(self)

    def load(self) -> ProjectedLoad:
        """Return the last report plus the bookings that it does not include."""
        if self._load is None:
            self._load = self._add_up()
        return self._load

    def _add_up(self) -> ProjectedLoad:
        assert self.facts is not None, f"{self.endpoint.worker_id}: no facts in state {self.state}"
        report, active = self.report, self._active
        num_free_blocks = report.num_free_blocks
        num_sequences = report.num_running + report.num_waiting + report.num_reserved
        num_pending_tokens = report.num_pending_prefill_tokens
        # Sequences that wait on a decode worker will decode there; those on a prefill worker never do.
        num_decodes = num_sequences if self.endpoint.role == worker_pb2.WORKER_ROLE_DECODE else 0
        num_free_slots = report.num_free_slots if report.HasField("num_free_slots") else math.inf
        num_context_tokens = report.num_context_tokens
        free_at_s = self.reported_s + report.prefill_backlog_s
        for booking in self.unreported:
            num_free_blocks -= booking.num_blocks
            num_sequences += 1
            num_decodes += booking.num_decodes
            num_free_slots -= booking.num_decodes
            num_context_tokens += booking.num_context_tokens
            if not booking.is_prefilled:
                num_pending_tokens += booking.num_missing_tokens
                free_at_s = max(free_at_s, booking.booked_s) + booking.prefill_s
        return ProjectedLoad(
            worker_id=self.endpoint.worker_id,
            num_blocks=self.facts.num_blocks,
            num_free_blocks=max(num_free_blocks, 0),
            num_growth_blocks=active.num_kept_blocks(num_decodes),
            num_free_slots=max(num_free_slots, 0),
            num_sequences=num_sequences,
            num_waiting=report.num_waiting + report.num_reserved,
            num_pending_prefill_tokens=num_pending_tokens,
            num_decodes=num_decodes,
            num_context_tokens=num_context_tokens,
            num_answer_tokens=active.num_blocks_per_answer * self.facts.block_size,
            prefill_free_at_s=free_at_s,
            num_cold_blocks=report.num_cold_blocks,
            num_cached_blocks=report.num_cached_blocks,
            num_active_requests=len(self.bookings),
            num_active_prefills=active.num_prefills,
            num_active_prefill_tokens=active.num_prompt_tokens,
            num_active_missing_tokens=active.num_missing_tokens,
            num_active_blocks=active.num_blocks,
            tier_free_at_s=self.tier_free_at_s,
            tpot_slos=tuple(active.num_by_tpot_slo),
            timing=self.timing,
        )
