"""Fewer and larger messages to clients when the router is busy.

A message to a client costs the router 20 to 40 µs, nearly all of it in gRPC and the kernel, whatever the number of its
tokens. While the event loop has time, every token goes out at once. When the loop is busy, each client is written to
once per *window*; tokens in between wait in its outbox as one message. The window doubles while the loop stays busy and
halves when it is not, so a router under load trades some milliseconds of smoothness for several times the tokens.
"""

import asyncio
import time
from pathlib import Path

SAMPLE_S = 0.1
BUSY = 0.85
"""Share of the time that the loop's thread runs, or would with a free core, above which the window grows."""
CALM = 0.45
"""Share below which the window shrinks; the distance keeps the window's own effect from closing it."""
MIN_WINDOW_S = 0.004
MAX_WINDOW_S = 0.032


class MergeWindow:
    """Delays the next message to clients that have just been written to. Event loop only."""

    def __init__(self) -> None:
        self.window_s = 0.0
        """Length of the window; 0: none."""
        self._end: asyncio.Event | None = None
        """Set at the end of the current window, which all clients share."""

    async def over(self) -> None:
        """Wait for the end of the current window, or begin one. Return at once while there is none."""
        if not self.window_s:
            return
        if self._end is None:
            self._end = asyncio.Event()
            asyncio.get_running_loop().call_later(self.window_s, self._finish)
        await self._end.wait()

    def adapt(self, busy: float) -> None:
        """Adapt to the share of the last interval in which the loop's thread was busy."""
        if busy > BUSY:
            self.window_s = min(max(2 * self.window_s, MIN_WINDOW_S), MAX_WINDOW_S)
        elif busy < CALM:
            self.window_s = self.window_s / 2 if self.window_s > MIN_WINDOW_S else 0.0

    async def watch(self) -> None:
        """Adapt until cancelled."""
        wall_s, wanted_s = time.monotonic(), _wanted_s()
        while True:
            await asyncio.sleep(SAMPLE_S)
            wall_before_s, wanted_before_s = wall_s, wanted_s
            wall_s, wanted_s = time.monotonic(), _wanted_s()
            self.adapt((wanted_s - wanted_before_s) / (wall_s - wall_before_s))

    def _finish(self) -> None:
        if self._end is not None:
            self._end.set()
            self._end = None


def _wanted_s() -> float:
    """Return how long this thread has run, plus its wait for a core where the kernel reports it."""
    try:
        computed_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(computed_ns) + int(waited_ns)) / 1e9
