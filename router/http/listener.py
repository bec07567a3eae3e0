"""Accepts connections one by one, and only while there is room for them; the others wait in the kernel.

A server that accepts every connection first can use up the process's open files, and the time of all clients, in one
turn of its event loop. Here a turn has a budget, and a client that has already left costs no connection.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable

from router.http.connections import Connections
from router.http.protocol import DoorProtocol

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
"""Limit of a TLS handshake."""
_ACCEPTS_PER_TURN = 4
"""Most connections made in one turn of the event loop: each costs tens of microseconds there."""
_ACCEPT_BUDGET_S = 0.001
"""Longest time for accepting in one turn, also of clients that have left."""
_ESTABLISHED = 1
"""State of a TCP connection that neither side has closed; the first byte of `tcp_info`."""
_PAUSE_S = 1.0
"""Wait after the system has refused another open file."""


class Listener:
    """A listening socket of its own. Event loop only."""

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        make_protocol: Callable[[], DoorProtocol],
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """Start accepting; with `tls`, which returns the context for each new connection, connections use TLS."""
        self._tls = tls
        self._socket = listening
        self._connections = connections
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._is_accepting = False
        self._pause: asyncio.TimerHandle | None = None
        connections.on_room = self._resume
        listening.settimeout(0)
        self._resume()

    def close(self) -> None:
        """Accept no more connections; existing ones stay."""
        self._connections.on_room = lambda: None
        self._stop()
        self._socket.close()
        for handshake in self._handshakes:
            handshake.cancel()

    def _resume(self) -> None:
        if not self._is_accepting and self._pause is None:
            self._is_accepting = True
            self._loop.add_reader(self._socket, self._accept)

    def _stop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._socket)

    def _accept(self) -> None:
        """Accept waiting connections. At least one waits, so that dropping another one for it is justified."""
        if not self._connections.has_room():
            self._stop()  # until a connection is gone
            return
        num_left = min(_ACCEPTS_PER_TURN, self._connections.most - self._connections.num_open)
        end_s = time.monotonic() + _ACCEPT_BUDGET_S
        while num_left and time.monotonic() < end_s:
            try:
                accepted, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("cannot accept a connection: %s; trying again in %g s", error.strerror, _PAUSE_S)
                self._stop()
                self._pause = self._loop.call_later(_PAUSE_S, self._end_pause)
                return
            if _has_left(accepted):
                accepted.close()
            else:
                num_left -= 1
                self._begin(accepted)

    def _end_pause(self) -> None:
        self._pause = None
        self._resume()

    def _begin(self, accepted: socket.socket) -> None:
        protocol = self._make_protocol()
        protocol.accepted = accepted
        self._connections.add(protocol)
        handshake = self._loop.create_task(self._connect(accepted, protocol), name="http handshake")
        self._handshakes.add(handshake)
        handshake.add_done_callback(lambda _: self._end(handshake, protocol))

    async def _connect(self, accepted: socket.socket, protocol: DoorProtocol) -> None:
        """Set up the connection of an accepted socket."""
        timeout_s = None if self._tls is None else _HANDSHAKE_S
        await self._loop.connect_accepted_socket(
            lambda: protocol, accepted, ssl=self._tls and self._tls(), ssl_handshake_timeout=timeout_s
        )

    def _end(self, handshake: "asyncio.Task[None]", protocol: DoorProtocol) -> None:
        self._handshakes.discard(handshake)
        error = None if handshake.cancelled() else handshake.exception()
        if handshake.cancelled() or error is not None:  # the protocol may never be told
            self._connections.discard(protocol)
            logger.debug("connection failed: %s", error)


def _has_left(accepted: socket.socket) -> bool:
    """Return whether a client has closed its connection, also behind a request that it has sent."""
    try:
        return accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
    except OSError:  # it has broken the connection
        return True
