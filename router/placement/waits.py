"""What requests in line wait for, and how long.

Requests are asked about one by one and wait together: those that are not asked about are behind the others of their
pool, so all wait for what the last of them was refused for. Only a tenant that has as many plans as it may have
(`max_concurrent`) waits for those to end, whatever the workers lack.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.clock import Clock
from common.errors import Refused
from router.placement.answer_pool import AnswerPool
from router.placement.plans import NoRoom, NoWorker, TooSlow

PRICE_S = 30.0
"""Time after which a wait counts a third as much in the price of answers."""


class WaitCause(enum.Enum):
    """A cause of waiting in line."""

    PREFILL = "prefill"
    """Its turn, and a worker that can begin with the prompt soon."""
    DECODE_ROOM = "decode_room"
    """A slot and pages on a decode worker."""
    DECODE_PACE = "decode_pace"
    """Decode workers that could keep the pace of another answer."""
    TENANT_LIMIT = "tenant_limit"
    """The end of another request of its tenant."""
    WORKER = "worker"
    """A worker that can be chosen."""


_REFUSALS: Mapping[type[Refused], WaitCause] = {
    NoRoom: WaitCause.DECODE_ROOM,
    NoWorker: WaitCause.WORKER,
    TooSlow: WaitCause.DECODE_PACE,
}


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds by cause."""

    by_cause: Mapping[WaitCause, float] = field(default_factory=dict)

    def __getitem__(self, cause: WaitCause) -> float:
        return self.by_cause.get(cause, 0.0)

    def __add__(self, other: "Waits") -> "Waits":
        return Waits({cause: self[cause] + other[cause] for cause in WaitCause})

    def __sub__(self, other: "Waits") -> "Waits":
        return Waits({cause: self[cause] - other[cause] for cause in WaitCause})

    @property
    def total_s(self) -> float:
        """Seconds of all causes."""
        return sum(self.by_cause.values())


NO_WAITS = Waits()


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request that waits in line now."""

    tenant: str
    waits: Waits
    """Its wait so far."""

    @property
    def whole_s(self) -> float:
        """All its time so far."""
        return self.waits.total_s


@dataclass(slots=True)
class _TenantWaits:
    """Difference between the waits of a tenant's newcomers and those of their pool."""

    moved: Waits = NO_WAITS
    """Waits that its limit has made its own."""
    held_at: Waits | None = None
    """Waits of the pool when the limit began to hold it; None: it does not."""

    def moved_until(self, pool: Waits) -> Waits:
        if self.held_at is None:
            return self.moved
        passed = pool - self.held_at
        return self.moved + Waits({WaitCause.TENANT_LIMIT: passed.total_s}) - passed


class PoolWaits:
    """Waits of the requests that one pool answers, since the start. Event loop only."""

    def __init__(self, clock: Clock, pool: AnswerPool) -> None:
        self._clock = clock
        self._pool = pool
        self._ended = NO_WAITS
        self._cause, self._since_s = WaitCause.PREFILL, clock.monotonic()
        self._price_before = 0.0
        """Price of answers at that time."""
        self._tenants: dict[str, _TenantWaits] = {}
        """Tenants that a limit has held."""

    def note(self, refused: Refused) -> None:
        """Note what a request was refused for: all wait for it from now on."""
        self._price_before = self.answer_price
        self._ended, self._since_s = self._all(), self._clock.monotonic()
        cause = _REFUSALS.get(type(refused), WaitCause.PREFILL)
        # The room of the prefill pool is all that the requests that it answers wait for.
        is_all = self._pool is AnswerPool.PREFILL and cause is WaitCause.DECODE_ROOM
        self._cause = WaitCause.PREFILL if is_all else cause

    @property
    def await_answers(self) -> bool:
        """Whether all wait for answers to end, so that a decode worker may take another one."""
        return self._cause in (WaitCause.DECODE_ROOM, WaitCause.DECODE_PACE)

    @property
    def answer_price(self) -> float:
        """Price of a second of decode workers: the share of the time lately in which answers had to end.

        The rest of 1 is the price of a second of workers that compute prompts.
        """
        left = math.exp((self._since_s - self._clock.monotonic()) / PRICE_S)
        return left * self._price_before + (1 - left) * self.await_answers

    def hold(self, tenant: str) -> None:
        """Note that newcomers of a tenant wait for its limit from now on. Harmless when repeated."""
        held = self._tenants.setdefault(tenant, _TenantWaits())
        if held.held_at is None:
            held.held_at = self._all()

    def release(self, tenant: str) -> None:
        """Note that they wait like all others again. Harmless when repeated."""
        if (held := self._tenants.get(tenant)) is not None:
            held.moved, held.held_at = held.moved_until(self._all()), None

    def read(self, tenant: str | None) -> Waits:
        """Return how long newcomers of a tenant have waited for what; None: requests that no limit holds."""
        waits, held = self._all(), self._tenants.get(tenant) if tenant is not None else None
        return waits if held is None else waits + held.moved_until(waits)

    def _all(self) -> Waits:
        return self._ended + Waits({self._cause: self._clock.monotonic() - self._since_s})
