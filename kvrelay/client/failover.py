"""Which router a call goes to, and which one is next when that one is gone.

Only what cannot have been answered is sent again: a call whose router could not be reached, or whose connection broke
(`Unreachable`). Reading calls change nothing. An answer that had begun goes on behind the tokens that have arrived
(`GenerateRequest.resume`), so that each comes once, wherever it is computed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest, KvrelayError, Unreachable

_LEAST_TIMEOUT_S = 0.001
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_ROUNDS = 6
"""By default, with several routers: how often each is tried."""


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """Return what tells how much is left of a timeout that begins now; a little always is, for a call to fail by."""
    if timeout_s is None:
        return lambda: None
    deadline_s = time.monotonic() + timeout_s
    return lambda: max(deadline_s - time.monotonic(), _LEAST_TIMEOUT_S)


class RouterList:
    """The routers that a client knows, and the one that worked last. Any thread."""

    def __init__(self, addresses: str | Sequence[str], *, max_attempts: int | None) -> None:
        """Take addresses, or one string of them with commas. Raises InvalidRequest without any."""
        listed = addresses.split(",") if isinstance(addresses, str) else addresses
        self.addresses = tuple(dict.fromkeys(address.strip() for address in listed if address.strip()))
        if not self.addresses:
            raise InvalidRequest("no router is named", field="address")
        if max_attempts is not None and max_attempts < 1:
            raise InvalidRequest(f"{max_attempts}; at least 1", field="max_attempts")
        several = _ROUNDS * len(self.addresses) if len(self.addresses) > 1 else 1
        self.max_attempts = several if max_attempts is None else max_attempts
        self._current = self.addresses[0]

    @property
    def current(self) -> str:
        """The router to call."""
        return self._current

    def leave(self, address: str) -> None:
        """Go on to the next router, unless somebody else has left this one already."""
        if self._current == address:
            self._current = self.addresses[(self.addresses.index(address) + 1) % len(self.addresses)]


@dataclass(slots=True)
class Attempts:
    """The attempts of one call."""

    routers: RouterList
    _num_failed: int = 0
    """In a row."""

    def failed(self, error: KvrelayError, *, address: str) -> float:
        """Note that an attempt failed; returns the seconds to wait before the next one.

        0 while some router has not been tried; then longer and longer. Raises the error when nothing else helps.
        """
        if not isinstance(error, Unreachable):
            raise error
        self._num_failed += 1
        if self._num_failed >= self.routers.max_attempts:
            raise error
        self.routers.leave(address)
        num_rounds, has_untried = divmod(self._num_failed, len(self.routers.addresses))
        return 0.0 if has_untried else min(_FIRST_PAUSE_S * 2.0 ** (num_rounds - 1), _LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """Note that tokens have come: whoever fails now is a new case."""
        self._num_failed = 0
