"""The connections of the HTTP API: how many are open, and which of them wait for their clients.

At most `most` are open. When all are taken, the one that has waited longest for its client (for the rest of a request,
or for the next one) is dropped: one of a stranger, on which no tenant has been served yet, as long as any waits. So
strangers take at most one place of tenants, however many connect. Connections whose requests run stay; `most_requests`
is less than `most`, so that requests alone never take every connection.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Time limits of a client."""

    head_s: float = 20.0
    """Limit from the first byte of a request, or from the connection, to the end of its headers."""
    idle_s: int = 75
    """Limit from an answer to the next request; no shorter than connection pools of clients keep connections."""


class DroppableConnection(Protocol):
    """Interface of a connection for `Connections`."""

    def drop(self) -> None:
        """Break the connection at once."""


class Connections:
    """All connections of the HTTP API. Event loop only."""

    def __init__(self, *, most: int, on_room: Callable[[], None] = lambda: None) -> None:
        """`on_room` is called when there may be room: a connection is gone, or has begun to wait."""
        self.most = most
        self.most_requests = most - max(1, most // 16)
        self.on_room = on_room
        self.num_dropped = 0
        """Connections dropped to make room."""
        self._open: set[DroppableConnection] = set()
        self._tenants: set[DroppableConnection] = set()
        """Connections on which a tenant has been served."""
        self._strangers_waiting: OrderedDict[DroppableConnection, None] = OrderedDict()
        """Other connections that wait for their clients, the one that has waited longest first."""
        self._tenants_waiting: OrderedDict[DroppableConnection, None] = OrderedDict()
        """The same of tenants."""

    @property
    def num_open(self) -> int:
        """Number of open connections, including those that are being dropped."""
        return len(self._open)

    def add(self, connection: DroppableConnection) -> None:
        """Count a new connection, which waits for its client."""
        self._open.add(connection)
        self._strangers_waiting[connection] = None

    def recognize(self, connection: DroppableConnection) -> None:
        """Note that a tenant has been served on a connection."""
        if connection in self._open and connection not in self._tenants:
            is_waiting = connection in self._strangers_waiting
            self._strangers_waiting.pop(connection, None)
            self._tenants.add(connection)
            if is_waiting:
                self._tenants_waiting[connection] = None

    def discard(self, connection: DroppableConnection) -> None:
        """Forget a connection that is gone."""
        self.works(connection)
        self._tenants.discard(connection)
        if connection in self._open:
            self._open.remove(connection)
            self.on_room()

    def waits(self, connection: DroppableConnection) -> None:
        """Note that a connection waits for its client; one that already waits keeps its place."""
        waiting = self._tenants_waiting if connection in self._tenants else self._strangers_waiting
        if connection in self._open and connection not in waiting:
            waiting[connection] = None
            if len(self._open) >= self.most:
                self.on_room()

    def works(self, connection: DroppableConnection) -> None:
        """Note that a connection waits for the server."""
        self._strangers_waiting.pop(connection, None)
        self._tenants_waiting.pop(connection, None)

    def has_room(self) -> bool:
        """Return whether another connection may be made; if not, drop one that waits, if any."""
        if len(self._open) < self.most:
            return True
        if waiting := self._strangers_waiting or self._tenants_waiting:
            self.num_dropped += 1
            connection, _ = waiting.popitem(last=False)
            connection.drop()
        return False
