"""A request, or a sample of one, that waits for a plan."""

import asyncio
import enum
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from common.errors import EngineFault, RefusalCause, Refused
from common.ids import NO_ROOT, HashRoot, WorkerId
from router.choosing.chooser import Exclusion
from router.choosing.shedding import Shed
from router.fleet.booking import Booking
from router.fleet.lives import Life
from router.line.tenant_queue import Place
from router.placement.calibration import DurationForecast
from router.placement.loads import ProjectedLoad
from router.placement.plans import Busy, NoRoom, PlacementRequest
from router.placement.waits import NO_WAITS, Waits
from router.record.ticket import Ticket


class Standing(enum.Enum):
    """Where a request waits."""

    NEWCOMER = "newcomer"
    """In its tenant's order; a limit of its tenant may hold it."""
    SET_BACK = "set back"
    """Likewise, without a limit: it had a plan, and gave its room to another tenant's request."""
    FIRST = "first"
    """Before all newcomers, because it has lost a worker."""

    @classmethod
    def of(cls, ticket: Ticket, *, is_set_back: bool) -> "Standing":
        """Return where a request begins to wait for its next plan."""
        if is_set_back:
            return cls.SET_BACK
        return cls.FIRST if ticket.has_plan else cls.NEWCOMER


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A refusal, and what it says about when asking again can help."""

    refused: Refused
    num_changes: int
    """Changes of the fleet before the refusal."""
    num_openings: int
    """Times that a worker had become free after none was."""
    at_s: float
    """Time at which the refusal suggests asking again."""
    exclusions_end_s: float
    """Time at which the first worker that refused the request itself may be asked again; infinite without any."""

    @property
    def is_busy(self) -> bool:
        """Whether it is better to wait for a worker that is busy with other prompts."""
        return self.awaited is not None

    @property
    def awaited(self) -> ProjectedLoad | None:
        """That worker, as it was then."""
        return self.refused.worker if isinstance(self.refused, Busy) else None

    @property
    def needs_room(self) -> bool:
        """Whether a worker that answers must have more slots or pages first."""
        return isinstance(self.refused, NoRoom)

    @property
    def lacks_room(self) -> bool:
        """Likewise, or fewer answers whose gaps another one would break."""
        return self.needs_room or self.refused.cause is RefusalCause.SATURATED

    @property
    def awaits_room(self) -> bool:
        """Whether nothing but more room helps.

        A saturated pool is closed to all that wait for it, so it is asked about again: others may fit by now.
        """
        return self.needs_room and self.refused.cause is not RefusalCause.SATURATED


@dataclass(slots=True, eq=False, kw_only=True)
class Wait(Place):
    """One wait for a plan, over all the refusals that it meets. A Search (choosing/chooser.py)."""

    ticket: Ticket
    request: PlacementRequest
    root: HashRoot = NO_ROOT
    """Root of its hashes; empty: no blocks are read for it while it waits."""
    patience_ends_s: float = math.inf
    """Time on the router's clock at which it gives up."""
    standing: Standing = Standing.NEWCOMER
    shed: Shed = Shed.NONE
    failed_pairs: Collection[tuple[Life, Life]] = ()
    exclusions: dict[WorkerId, Exclusion] = field(default_factory=dict)
    on_waiting: Callable[[DurationForecast | None], None] = lambda _forecast: None
    """Called when a newcomer begins to wait, with the forecast of its first token; None while there is no worker."""
    on_late: Callable[[], None] | None = None
    """Adapts a request that is late, or would be refused for its objective; None: nothing to adapt."""
    granted: "asyncio.Future[Booking | Refused | EngineFault]" = field(init=False)
    retry: Retry | None = None
    """The last refusal; None before the first."""
    line_forecast: DurationForecast | None = None
    awaits_answer: bool = False
    claims_again_s: float = 0.0
    """Time from which it may look again for room that other tenants have beyond their share."""
    waits_before: Waits = NO_WAITS
    """Waits of requests like it (`PlanFinder.waits`) at its arrival in line."""
    read_ahead: Place | None = None
    """Its place among those whose blocks a worker reads meanwhile; None: no worker was asked."""
    num_overtaken: int = 0
    """Plans given to requests behind this one after it was refused one."""

    @property
    def tenant(self) -> str:
        """Name of its tenant."""
        return self.ticket.account.tenant.name

    @property
    def is_settled(self) -> bool:
        """Whether it has ended, or is about to because its task is cancelled."""
        return self.granted.done()

    def settle(self, outcome: Booking | Refused | EngineFault) -> None:
        """End it."""
        self.granted.set_result(outcome)

    def become_late(self) -> None:
        """Adapt the request once, before it is tried as a late one."""
        if self.on_late is not None:
            self.on_late()
            self.on_late = self.retry = None
