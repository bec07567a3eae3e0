"""Turns on the event loop: requests begin in fair order, and no more at once than keep every turn of the loop short.

One event loop serves all tenants, and each request takes some milliseconds of it in several steps. While it is calm a
request begins at once. When a turn of the loop takes longer than `LONG_S`, fewer begin in the next one, and the others
wait, by the fair queue's counters (fair_queue.py) of the seconds that each tenant's requests have taken of the loop. So
the newcomer of a tenant that asks little waits for a turn or two, whatever the others send, and a loop that is full
stays quick: it answers health checks, and every running stream.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from common.clock import turn_time_s
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


@dataclass(slots=True, eq=False, kw_only=True)
class _Turn(Place):
    """Work that waits for the event loop."""

    begins: "asyncio.Future[None]"


class Turns:
    """The line for the event loop. Event loop only."""

    def __init__(self) -> None:
        self._queue: FairQueue[_Turn] = FairQueue()
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
        name, now_s = tenant.name, turn_time_s()
        if self._num_waiting[name] >= MAX_WAITING and not is_running:
            reason = f"tenant {name}: {MAX_WAITING} requests wait to be read"
            return Refused(
                reason=reason, retry_after_s=self._pace.promise_s(now_s), cause=RefusalCause.TENANT_QUEUE_FULL
            )
        if not len(self._queue):
            self._pace.begin(now_s)
        self._num_asked += 1
        self._queue.add_tenant(name, weight=tenant.weight)
        key = rank(priority=0, size_s=0.0, due_s=0.0, number=self._num_asked)
        turn = _Turn(rank=key, begins=asyncio.get_running_loop().create_future())
        self._queue.push(turn, tenant=name)
        self._num_waiting[name] += 1
        self._arm()
        try:
            await turn.begins
        finally:
            self._leave(turn)
        return None

    def charge(self, tenant: Tenant, seconds: float) -> None:
        """Count time that a tenant's requests have taken of the loop."""
        self._queue.add_tenant(tenant.name, weight=tenant.weight)
        self._queue.charge(tenant.name, seconds)

    def _leave(self, turn: _Turn) -> None:
        self._queue.discard(turn)
        tenant = turn.queue.name
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]

    def _begin(self) -> None:
        self._num_begun += 1
        self._arm()

    def _arm(self) -> None:
        """Have the next turn of the loop noticed."""
        if self._turn_began_s is None:
            self._turn_began_s = turn_time_s()
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Begin what may begin in this turn of the loop."""
        assert self._turn_began_s is not None, "a turn that was armed"
        took_s = turn_time_s() - self._turn_began_s
        self._turn_began_s = None
        if took_s > LONG_S:
            self._num_allowed = max(1, self._num_allowed // 2)
        elif took_s < SHORT_S:
            self._num_allowed = min(2 * self._num_allowed, MAX_BEGUN)
        self._num_begun = 0
        while self._num_begun < self._num_allowed and (turn := self._queue.pop(now_s=0.0, skipping=())) is not None:
            if not turn.begins.done():  # otherwise its request has left
                turn.begins.set_result(None)
                self._pace.depart(turn_time_s())
                self._begin()
        if len(self._queue):
            self._arm()
