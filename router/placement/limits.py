"""Rate limits, and the pace of the line. Callers pass the time, in seconds of one monotonic clock."""

import math

MIN_RETRY_S = 0.05
MAX_RETRY_S = 60.0
UNKNOWN_RETRY_S = 1.0
"""Advice while nothing has been measured."""
_MEMORY_S = 10.0


def retry_after(seconds: float) -> float:
    """Return the wait that a client is advised, from MIN_RETRY_S to MAX_RETRY_S."""
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)


class TokenBucket:
    """A rate limit that holds one minute's worth and lets a single request overdraw it.

    A request passes while the bucket holds its cost or is full: a request larger than the bucket waits until everything
    before it is paid for, but is not locked out for ever.
    """

    def __init__(self, *, per_min: float, now_s: float) -> None:
        self._per_s = per_min / 60.0
        self._capacity = per_min
        self._level = per_min
        self._filled_s = now_s

    def wait_s(self, cost: float, now_s: float) -> float:
        """Return how long it takes until `cost` may be taken; 0: now."""
        self._fill(now_s)
        return max(0.0, (min(cost, self._capacity) - self._level) / self._per_s)

    def take(self, cost: float, now_s: float) -> None:
        """Take the cost, below zero if need be; a negative cost gives back."""
        self._fill(now_s)
        self._level = min(self._level - cost, self._capacity)

    def _fill(self, now_s: float) -> None:
        self._level = min(self._level + (now_s - self._filled_s) * self._per_s, self._capacity)
        self._filled_s = now_s


class Pace:
    """Measures how fast a line moves, and promises each coming free place to one request that finds the line full.

    The pace is departures per second of waiting, both forgotten with the time constant `_MEMORY_S`. A line that has
    stood still for longer than its usual gap counts as that slow.
    """

    def __init__(self) -> None:
        self._num_departed = 0.0
        self._waited_s = 0.0
        self._last_s = 0.0
        self._promised_s = 0.0

    def begin(self, now_s: float) -> None:
        """Note that a request waits in a line that was empty."""
        self._forget(now_s)

    def depart(self, now_s: float) -> None:
        """Note that a request has left the line for a worker."""
        gap_s = now_s - self._last_s
        self._forget(now_s)
        self._waited_s += gap_s
        self._num_departed += 1.0

    def gap_s(self, now_s: float) -> float:
        """Return the expected time from one departure to the next."""
        if not self._waited_s or not self._num_departed:
            return UNKNOWN_RETRY_S
        return max(self._waited_s / self._num_departed, now_s - self._last_s)

    def promise_s(self, now_s: float) -> float:
        """Return the pause before the next try: the k-th caller is sent to the k-th place that becomes free."""
        self._promised_s = min(max(self._promised_s, now_s) + self.gap_s(now_s), now_s + MAX_RETRY_S)
        return retry_after(self._promised_s - now_s)

    def _forget(self, now_s: float) -> None:
        kept = math.exp((self._last_s - now_s) / _MEMORY_S)
        self._num_departed *= kept
        self._waited_s *= kept
        self._last_s = now_s
