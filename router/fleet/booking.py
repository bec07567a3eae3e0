"""A booked plan, its part on each worker, and the sums over all parts that a worker has."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.block_hash import NO_HASHES, BlockHashes
from common.ids import Epoch, RequestId
from router.fleet.decisions import DecisionRecord
from router.fleet.lives import Life
from router.placement.plans import Plan
from router.tenants import ANYBODY, Tenant

if TYPE_CHECKING:
    from router.fleet.member import Member

STAY_S = 0.25
"""How long an answer that was set back once stays when it runs again; each further time, twice as long."""


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerBooking:
    """The part of a booking on one life of one worker."""

    member: "Member"
    epoch: Epoch
    request_id: RequestId
    booked_s: float
    load_version: int
    """Version of the worker's load that the plan was chosen by (`Member.load_version`)."""
    num_blocks: int
    """Pages that the request will occupy."""
    num_prompt_tokens: int = 0
    """Prompt tokens if the worker computes the prompt; else 0."""
    num_missing_tokens: int = 0
    """Prompt tokens that the worker is expected to compute."""
    prefill_s: float = 0.0
    """Predicted time of that computation."""
    num_decodes: int = 0
    """Sequences that the request adds to the worker's decode batch."""
    num_context_tokens: int = 0
    """KV tokens of these sequences."""
    num_growth_blocks: float = 0.0
    """Pages that their answers are expected to fill."""
    tpot_slo_s: float = math.inf
    """Objective for the mean gap of these sequences; infinite when the worker cannot keep it."""
    bounds_prompts: bool = False
    """Whether the worker holds prompts back for this objective: there is no prefill worker to compute them instead."""
    is_quarantined: bool = False
    """The request may be the one that crashes the workers that compute it."""
    is_prefilled: bool = False
    """The first token has arrived."""
    has_answered: bool = False
    """Whether the worker has answered the call, so that it was alive when the call came."""
    has_left: bool = False
    """The worker has nothing more to do for the request."""

    @property
    def life(self) -> Life:
        """The worker, and which of its lives."""
        return self.member.endpoint.worker_id, self.epoch


@dataclass(slots=True, eq=False)
class BookingSums:
    """Sums over the bookings of one life."""

    num_blocks: int = 0
    num_prefills: int = 0
    """Prompts to be computed whose first token has not arrived."""
    num_prompt_tokens: int = 0
    """Tokens of these prompts."""
    num_missing_tokens: int = 0
    """Tokens of these prompts that are expected to be computed."""
    num_decodes: int = 0
    num_growth_blocks: float = 0.0
    num_by_tpot_slo: Counter[float] = field(default_factory=Counter)
    """Decoding bookings by their objective, if they have one."""

    def num_kept_blocks(self, num_decodes: int) -> float:
        """Return the free pages to keep for `num_decodes` answers that grow as the active ones do.

        While answers come and go, the pages of those that end pay for the growth of the others, in the mean. The number
        that ends in a time scatters by its square root, so that many answers need no more than that share.
        """
        return math.sqrt(num_decodes) * self.num_blocks_per_answer

    @property
    def num_blocks_per_answer(self) -> float:
        """Pages that an answer is expected to fill, in the mean; 0 without any answer."""
        return self.num_growth_blocks / self.num_decodes if self.num_decodes else 0.0

    def count(self, booking: WorkerBooking, sign: int) -> None:
        """Add a booking, or take it out."""
        self.num_blocks += sign * booking.num_blocks
        self.num_decodes += sign * booking.num_decodes
        self.num_growth_blocks += sign * booking.num_growth_blocks
        if not booking.is_prefilled and booking.num_prompt_tokens:
            self.num_prefills += sign
            self.num_prompt_tokens += sign * booking.num_prompt_tokens
            self.num_missing_tokens += sign * booking.num_missing_tokens
        if booking.tpot_slo_s != math.inf:
            self.num_by_tpot_slo[booking.tpot_slo_s] += sign
            if not self.num_by_tpot_slo[booking.tpot_slo_s]:
                del self.num_by_tpot_slo[booking.tpot_slo_s]


@dataclass(slots=True, eq=False, kw_only=True)
class Booking:
    """A booked plan. Leaving its `with` block releases everything, exactly once."""

    decision: DecisionRecord
    answering: WorkerBooking
    """On the worker that answers."""
    prefill: WorkerBooking | None = None
    """Set exactly when the plan is remote."""
    on_release: "Callable[[Booking], None]"
    source: "Member | None" = None
    """Where leading blocks are pulled from; None also when the plan's source is gone. Nothing is booked there."""
    hashes: BlockHashes = NO_HASHES
    """Hashes of the blocks that the plan fills; empty when they are not cached."""
    tenant: Tenant = ANYBODY
    number: int = 0
    """Position of the request in the order of arrival."""
    num_set_back: int = 0
    """Times that the answer was set back before."""
    count_blocks: Callable[[], int] | None = None
    """Returns the pages that the answer fills now; None before its attempt."""
    running: asyncio.Timeout | None = None
    """Ends the attempt of an answer; None before and after it, and for an embedding."""
    is_set_back: bool = False
    """Whether it was ended so."""

    @property
    def plan(self) -> Plan:
        """The booked plan."""
        return self.decision.plan

    @property
    def on_workers(self) -> tuple[WorkerBooking, ...]:
        """Its parts, on one worker or two."""
        return (self.answering,) if self.prefill is None else (self.answering, self.prefill)

    @property
    def num_filled_blocks(self) -> int:
        """Pages that the answer fills on its worker; those that it was granted, before its attempt."""
        return self.answering.num_blocks if self.count_blocks is None else self.count_blocks()

    def may_go(self, now_s: float) -> bool:
        """Return whether the answer may be set back: it runs, and has stayed long enough since the last time."""
        stay_s = STAY_S * 2.0 ** (self.num_set_back - 1) if self.num_set_back else 0.0
        return self.running is not None and not self.is_set_back and now_s - self.decision.decided_s >= stay_s

    def set_back(self) -> None:
        """End the attempt at once, wherever it is; the answer goes on later with the same tokens."""
        assert self.running is not None, "an answer is set back while it runs"
        self.is_set_back = True
        self.running.reschedule(asyncio.get_running_loop().time())

    def __enter__(self) -> "Booking":
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    def release(self) -> None:
        """Give everything back. Harmless when repeated."""
        self.on_release(self)
