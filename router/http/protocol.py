"""uvicorn's HTTP protocol with a bound on the head of a request, which httptools collects for as long as it comes."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Drops a client whose request line and headers do not end."""

    _num_head_bytes: int | None = None
    """Of a request whose head has begun and not ended."""

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
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
        """End its head."""
        self._num_head_bytes = None
        super().on_headers_complete()
