"""The connections of the HTTP door: how many there are, and which of them wait for their clients.

Open ones never outnumber `most`. When there is no room, the one goes that has waited longest for its client: for the
rest of a request, or for the next one. Those whose requests run stay; `most_requests` is less than `most`, so that
requests alone never fill the door.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a client may take."""

    head_s: float = 20.0
    """From the first byte of a request, or from the connection, to the end of its headers."""
    idle_s: int = 75
    """From an answer to the next request: as long as the pools of clients keep connections, or longer."""


class Connection(Protocol):
    """What the table needs of a connection."""

    def drop(self) -> None:
        """Break the connection at once."""


class Connections:
    """All connections of the door. Event loop only."""

    def __init__(self, *, most: int, on_room: Callable[[], None] = lambda: None) -> None:
        """`on_room` is called whenever there may be room: a connection is gone, or could go."""
        self.most = most
        self.most_requests = most - max(1, most // 16)
        self.on_room = on_room
        self.num_dropped = 0
        """Connections that went to make room."""
        self._open: set[Connection] = set()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        """Those that wait for their clients, the one that has waited longest first."""

    @property
    def num_open(self) -> int:
        """Connections that are open, those included that are just being dropped."""
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Count a connection that was just made, and waits for its client."""
        self._open.add(connection)
        self._waiting[connection] = None

    def discard(self, connection: Connection) -> None:
        """Forget a connection that is gone."""
        self._waiting.pop(connection, None)
        if connection in self._open:
            self._open.remove(connection)
            self.on_room()

    def waits(self, connection: Connection) -> None:
        """Note that it is the client's turn; keeps the place of one that has been waiting."""
        if connection in self._open and connection not in self._waiting:
            self._waiting[connection] = None
            if len(self._open) >= self.most:
                self.on_room()

    def works(self, connection: Connection) -> None:
        """Note that it is the server's turn."""
        self._waiting.pop(connection, None)

    def has_room(self) -> bool:
        """Return whether another connection may be made; when not, one is being dropped if any waits."""
        if len(self._open) < self.most:
            return True
        if self._waiting:
            self.num_dropped += 1
            connection, _ = self._waiting.popitem(last=False)
            connection.drop()
        return False
