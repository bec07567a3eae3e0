"""Server-sent events of a response, numbered, as text."""

from typing import Any

from router.http.styles import quote


class Events:
    """Events that have not gone out yet; none where the answer is not streamed. Event loop only."""

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._num_told = 0
        self._waiting: list[str] = []

    def tell(self, kind: str, **members: Any) -> None:
        """Add an event."""
        if self._is_streamed:
            self.tell_json(kind, quote(members)[1:-1])

    def tell_json(self, kind: str, members: str) -> None:
        """Add an event whose members, at least one, have been rendered: `"a":1,"b":2`."""
        if self._is_streamed:
            number = self._num_told
            self._waiting.append(f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{members}}}\n\n')
            self._num_told += 1

    def take(self) -> bytes:
        """Return the events that wait, once."""
        taken = "".join(self._waiting)
        self._waiting.clear()
        return taken.encode()
