"""Notices workers that have fallen silent without closing their connection.

A stopped process, a hung event loop and a cut network look alike: no update comes, and TCP says nothing for minutes.
Workers send an update at least every `HEARTBEAT_S`, so a router knows within about a second. A worker whose updates
have lately been late, on a busy host, is given more time.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import NoReturn

from common.clock import Clock
from router.fleet.member import Member, WorkerState

HEARTBEAT_S = 0.25
"""Longest time between two updates that routers ask for."""
TICK_S = 0.1
MAX_LAG_S = 0.5
"""Longest pause of this router itself; after a longer one, silence counts from its end."""
GAP_FACTOR = 4.0
"""Multiple of a worker's longest recent gap between two updates that does not yet count as silence."""
MAX_FACTOR = 5.0
"""Multiple of the shortest silence after which a worker with late updates counts as silent, too."""


class SilenceWatch:
    """Looks for silent workers. Event loop only."""

    def __init__(
        self,
        *,
        members: Callable[[], Iterable[Member]],
        on_silent: Callable[[Member, float], None],
        clock: Clock,
        silence_s: float,
    ) -> None:
        """`on_silent` gets a ready worker and the seconds since its last update, at every tick of the silence.

        `silence_s`: shortest time without an update that is silence.
        """
        self._members = members
        self._on_silent = on_silent
        self._clock = clock
        self._silence_s = silence_s
        self._looked_s = self._listens_s = clock.monotonic()

    async def watch(self) -> NoReturn:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.look()

    def look(self) -> None:
        """Report every ready worker that is silent now."""
        now_s = self._clock.monotonic()
        if now_s - self._looked_s > MAX_LAG_S:
            self._listens_s = now_s
        self._looked_s = now_s
        silent = [
            (member, silent_s)
            for member in self._members()
            if member.state is WorkerState.READY
            and (silent_s := now_s - max(member.reported_s, self._listens_s)) > self._silence_s
            # A worker whose second update has yet to come has shown no gap.
            and silent_s > min(GAP_FACTOR * (member.usual_gap_s or HEARTBEAT_S), MAX_FACTOR * self._silence_s)
        ]
        for member, silent_s in silent:
            self._on_silent(member, silent_s)
