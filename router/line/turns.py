"""Turns on the event loop: requests begin in fair order, and no more at once than keep every turn of the loop short.

One event loop serves all tenants, and each request takes some milliseconds of it in several steps. While it is calm a
request begins at once. When a turn of the loop takes longer than `LONG_S`, fewer begin in the next one, and the others
wait, by the fair queue's counters (fair_queue.py) of the seconds that each tenant's requests have taken of the loop. So
the newcomer of a tenant that asks little waits for a turn or two, whatever the others send, and a loop that is full
stays quick: it answers health checks, and every running stream.
"""

import asyncio
import time
from collections import Counter

from common.errors import RefusalCause, Refused
from router.line.fair_queue import FairQueue
from router.line.tenant_queue import Place, rank
from router.placement.limits import Pace
from router.tenants import Tenant

MAX_WAITING = 256
"""Requests of one tenant that may wait for a turn."""
MAX_BEGUN = 16
"""Most requests that begin in one turn."""
LONG_S, SHORT_S = 0.004, 0.002
"""Length of a turn above which fewer begin in the next one, and below which more do."""


class Turns:
    """The line for the event loop. Event loop only."""

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._num_waiting: Counter[str] = Counter()
        self._pace = Pace()
        self._num_asked = 0
        self._num_allowed = MAX_BEGUN
        """Requests that may begin in this turn of the loop, as the last turns were long or short."""
        self._num_begun = 0
        self._turn_began_s: float | None = None
        """None while no request has begun in this turn, and none waits."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a turn."""
        return len(self._queue)

    async def take(self, tenant: Tenant, *, is_running: bool = False) -> Refused | None:
        """Return when work of the tenant may begin; or why it may not, because too much of it waits.

        Work of a request that `is_running` is never refused.
        """
        if not len(self._queue) and self._num_begun < self._num_allowed:
            self._begin()
            return None
        name, now_s = tenant.name, time.monotonic()
        if self._num_waiting[name] >= MAX_WAITING and not is_running:
            reason = f"tenant {name}: {MAX_WAITING} requests wait to be read"
            return Refused(
                reason=reason, retry_after_s=self._pace.promise_s(now_s), cause=RefusalCause.TENANT_QUEUE_FULL
            )
        if not len(self._queue):
            self._pace.begin(now_s)
        self._num_asked += 1
        self._queue.add_tenant(name, weight=tenant.weight)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        key = rank(priority=0, work_s=0.0, due_s=0.0, number=self._num_asked)
        place = self._queue.push(turn, tenant=name, rank=key)
        self._num_waiting[name] += 1
        self._arm()
        try:
            await turn
        finally:
            self._leave(place)
        return None

    def charge(self, tenant: Tenant, seconds: float) -> None:
        """Count time that a tenant's requests have taken of the loop."""
        self._queue.add_tenant(tenant.name, weight=tenant.weight)
        self._queue.charge(tenant.name, seconds)

    def _leave(self, place: Place[asyncio.Future[None]]) -> None:
        self._queue.discard(place)
        self._num_waiting[place.tenant] -= 1
        if not self._num_waiting[place.tenant]:
            del self._num_waiting[place.tenant]

    def _begin(self) -> None:
        self._num_begun += 1
        self._arm()

    def _arm(self) -> None:
        """Have the next turn of the loop noticed."""
        if self._turn_began_s is None:
            self._turn_began_s = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Begin what may begin in this turn of the loop."""
        assert self._turn_began_s is not None, "a turn that was armed"
        took_s = time.perf_counter() - self._turn_began_s
        self._turn_began_s = None
        if took_s > LONG_S:
            self._num_allowed = max(1, self._num_allowed // 2)
        elif took_s < SHORT_S:
            self._num_allowed = min(2 * self._num_allowed, MAX_BEGUN)
        self._num_begun = 0
        while self._num_begun < self._num_allowed and (place := self._queue.pop(now_s=0.0, skipping=())) is not None:
            if not place.item.done():  # otherwise its request has left
                place.item.set_result(None)
                self._pace.depart(time.monotonic())
                self._begin()
        if len(self._queue):
            self._arm()
