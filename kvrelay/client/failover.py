"""Chooses the router of a call, and the next one when it is gone.

Only calls that fail with `Unreachable` are sent again: their router could not be reached, the connection broke, or the
router dropped the call.
Reading calls change nothing. An answer that had begun is resumed after the tokens that have arrived
(`GenerateRequest.resume`), so that each token comes once, from any router.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import Cancelled, InvalidRequest, KvrelayError, Unreachable
from common.rpc import PING_TIMEOUT_MS, REPLACEABLE_PING_TIMEOUT_MS

_LEAST_TIMEOUT_S = 0.001
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_ROUNDS = 6
"""Default number of attempts per router, when there are several."""
_ROUNDS_ALONE = 9
"""The same for an answer of the only router, once it has begun: nine seconds, in which a router that died is back."""


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """Start a timeout; returns a function for the seconds left, which are always positive, so that calls time out."""
    if timeout_s is None:
        return lambda: None
    deadline_s = time.monotonic() + timeout_s
    return lambda: max(deadline_s - time.monotonic(), _LEAST_TIMEOUT_S)


def ping_timeout_ms(addresses: Sequence[str]) -> int:
    """Return how long a router may take to answer a ping: shorter where the client knows another one."""
    return REPLACEABLE_PING_TIMEOUT_MS if len(addresses) > 1 else PING_TIMEOUT_MS


class RouterList:
    """The known routers, and the one that worked last. Any thread."""

    def __init__(self, addresses: str | Sequence[str], *, max_attempts: int | None) -> None:
        """Take a list of addresses, or a string with commas. Raises InvalidRequest for an empty one."""
        listed = addresses.split(",") if isinstance(addresses, str) else addresses
        self.addresses = tuple(dict.fromkeys(address.strip() for address in listed if address.strip()))
        if not self.addresses:
            raise InvalidRequest("no router address given", field="address")
        if max_attempts is not None and max_attempts < 1:
            raise InvalidRequest(f"max_attempts is {max_attempts}; it must be at least 1", field="max_attempts")
        self.max_attempts = max_attempts
        """Bound for calls that fail in a row, where the client was given one."""
        self.current = self.addresses[0]
        """The router to call."""
        self._closing = threading.Event()

    def only_current(self) -> "RouterList":
        """Return a list of the present router alone, for calls that stay with it; it is closed with this one."""
        alone = RouterList([self.current], max_attempts=1)
        alone._closing = self._closing
        return alone

    def close(self) -> None:
        """Note that the client was closed, which cancels its calls."""
        self._closing.set()

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed."""
        return self._closing.is_set()

    def leave(self, address: str) -> None:
        """Switch to the next router, unless another call has done so already."""
        if self.current == address:
            self.current = self.addresses[(self.addresses.index(address) + 1) % len(self.addresses)]


@dataclass(slots=True)
class Attempts:
    """The attempts of one call."""

    routers: RouterList
    _num_failed: int = 0
    """Consecutive failures."""
    _was_answered: bool = False
    """Whether a router has ever replied to this call."""

    def failed(self, error: KvrelayError, *, address: str) -> float:
        """Note a failed attempt; returns the seconds to wait before the next one.

        0 while some router has not been tried, then growing. Raises the error when another attempt cannot help, and
        Cancelled when the client was closed meanwhile.
        """
        if self.routers.is_closed:
            raise Cancelled("the client was closed during the call") from error
        if not isinstance(error, Unreachable):
            raise error
        self._num_failed += 1
        if self._num_failed >= self._max_attempts:
            raise error
        self.routers.leave(address)
        num_rounds, has_untried = divmod(self._num_failed, len(self.routers.addresses))
        return 0.0 if has_untried else min(_FIRST_PAUSE_S * 2.0 ** (num_rounds - 1), _LONGEST_PAUSE_S)

    def answered(self) -> None:
        """Note that a router has replied: even the only one is worth another attempt."""
        self._was_answered = True

    def succeeded(self) -> None:
        """Note that tokens have come: the count of failures starts anew."""
        self._num_failed = 0

    @property
    def _max_attempts(self) -> int:
        """Failures in a row that end the call; one is enough at a single address that has never replied."""
        if self.routers.max_attempts is not None:
            return self.routers.max_attempts
        num_routers = len(self.routers.addresses)
        if num_routers > 1:
            return _ROUNDS * num_routers
        return _ROUNDS_ALONE if self._was_answered else 1
