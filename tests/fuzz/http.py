"""One HTTP connection to the door of a world, and the answers that come over it."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httptools

from tests.fuzz.world import World
from tests.router.http.connection import FakeTransport

_READS_FOR_S = 200.0
"""Longer than idle connections are kept."""


async def talk(world: World, pieces: Sequence[bytes], *, gap_s: float = 0.0, leaves_at: int | None = None) -> bytes:
    """Send the pieces, read until the connection is idle or over, and return what came.

    The client leaves after `leaves_at` pieces; None: it stays.
    """
    protocol = world.connect_http()
    transport = FakeTransport(protocol)
    protocol.connection_made(transport)
    for position, piece in enumerate(pieces):
        if leaves_at == position or transport.over.is_set():
            break
        await transport.may_send.wait()
        if not transport.over.is_set():
            protocol.data_received(piece)
        await asyncio.sleep(gap_s)
    else:
        with suppress(TimeoutError):
            async with asyncio.timeout(_READS_FOR_S):
                await transport.over.wait()
    transport.leave()
    return bytes(transport.written)


@dataclass(slots=True)
class Answer:
    """One answer, as far as it came."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""


class Answers:
    """The answers in the bytes of a connection."""

    def __init__(self, came: bytes) -> None:
        """Raises HttpParserError where these are not answers; an answer to HEAD hides those behind it."""
        self.found: list[Answer] = []
        self._parser = httptools.HttpResponseParser(self)
        with suppress(httptools.HttpParserUpgrade):
            self._parser.feed_data(came)

    @property
    def statuses(self) -> list[int]:
        """Statuses in the order of the answers."""
        return [each.status for each in self.found]

    def on_message_begin(self) -> None:
        """Begin an answer."""
        self.found.append(Answer())

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self.found[-1].headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Keep the status."""
        self.found[-1].status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self.found[-1].body += body
