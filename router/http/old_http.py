"""Answers to HTTP/1.0, which knows no chunks: one whose length is not known ends with the connection."""

import sys

from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def ended_by_close(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return an application whose response to a request of HTTP/1.0 is sent as it is, without chunks.

    uvicorn closes the connection after each such response.
    """
    cycle.chunked_encoding = False

    async def run(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_unframed(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body":  # uvicorn holds a response to the length that it expects
                cycle.expected_content_length = sys.maxsize if message["more_body"] else len(message["body"])
            await send(message)

        await app(scope, receive, send_unframed)

    return run
