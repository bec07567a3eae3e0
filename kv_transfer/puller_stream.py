"""The puller of one transfer: its messages and what it is sent, each within a time."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from common.errors import HandoffGone, InvalidRequest
from kvrelay.v1 import kv_transfer_pb2 as pb


class PullerStream:
    """The other end of a call of `FetchBlocks`. All methods raise HandoffGone when it has left, or is late."""

    def __init__(
        self,
        requests: AsyncIterator[pb.FetchBlocksRequest],
        context: grpc.aio.ServicerContext[Any, Any],
        *,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: the longest wait for one message, and for the puller to read what it was sent at once."""
        self._requests = requests
        self._context = context
        self._timeout_s = timeout_s

    async def opened(self) -> pb.OpenFetch:
        """Return the first message. Raises InvalidRequest for another one than that."""
        message = await self._next(late="the puller sent no request")
        if message is None or message.WhichOneof("message") != "open":
            raise InvalidRequest("the first message must be open", field="message")
        return message.open

    async def taken(self) -> None:
        """Wait until the puller has taken what was lent to it."""
        late = "the puller does not say that it has taken its blocks"
        await self._expect("taken", late=late, gone="the puller left before it had taken its blocks")

    async def acknowledged(self) -> None:
        """Wait until the puller has verified the manifest."""
        late = "the puller did not acknowledge the manifest"
        await self._expect("ack", late=late, gone="the puller left without an acknowledgement")

    async def write(self, messages: Iterable[pb.FetchBlocksResponse]) -> None:
        """Send messages with blocks."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for message in messages:
                    await self._context.write(message)
        except TimeoutError:
            raise HandoffGone("the puller has stopped reading") from None

    async def _expect(self, kind: str, *, late: str, gone: str) -> None:
        message = await self._next(late=late)
        if message is None or message.WhichOneof("message") != kind:
            raise HandoffGone(gone)

    async def _next(self, *, late: str) -> pb.FetchBlocksRequest | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await anext(self._requests, None)
        except TimeoutError:
            raise HandoffGone(late) from None
