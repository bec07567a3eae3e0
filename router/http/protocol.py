"""uvicorn's HTTP protocol, with two holes closed.

- httptools collects the head of a request for as long as it comes: here it has a bound.
- A lost connection is told to the last request that came on it. A client that sends its next request before it has
  read the answer would take the running one's news away: here every request of the connection is told.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    _num_head_bytes: int | None = None
    """Of a request whose head has begun and not ended."""
    _earlier: tuple[RequestResponseCycle, ...] = ()
    """Requests before the last one that are not answered."""

    def data_received(self, data: bytes) -> None:
        """Parse what came; drop a client whose request line and headers do not end."""
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.close()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End the head of a request."""
        self._num_head_bytes = None
        before: RequestResponseCycle | None = self.cycle
        if before is not None:
            self._earlier = tuple(each for each in (*self._earlier, before) if not each.response_complete)
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request that its client has left."""
        for cycle in self._earlier:
            cycle.disconnected = True
            cycle.message_event.set()
        self._earlier = ()
        super().connection_lost(exc)
