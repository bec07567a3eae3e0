"""Server-sent events, as far as completions need them (WHATWG HTML, 9.2)."""

from collections.abc import Iterator


class SseReader:
    """Cuts a stream of bytes into the data of its events. Lines end with LF or CRLF; other fields are skipped.

    A line may be of any length: an event that repeats a long prompt's token ids has hundreds of kilobytes.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of each event that `received` completes; several `data` lines are joined by LF."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
