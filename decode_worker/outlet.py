"""What a call has to say and nobody has taken yet."""

from collections.abc import Callable

from common.token_batches import merge_tokens
from kvrelay.v1 import decode_pb2 as pb


class Outlet:
    """A call's messages, in order. While nobody takes them, tokens gather in one message. Event loop only.

    So a reader that is slow, or gone for a while, costs memory for the tokens themselves, of which a request has at
    most `max_tokens` per sample, and slows nobody else.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` hears of every new message."""
        self._messages: list[pb.DecodeResponse] = []
        self._wake = wake

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._messages

    def put(self, message: pb.DecodeResponse) -> None:
        """Append a message."""
        self._messages.append(message)
        self._wake()

    def put_tokens(self, batch: pb.TokenBatch) -> None:
        """Append new tokens."""
        last = self._messages[-1] if self._messages else None
        if last is not None and last.HasField("tokens"):
            merge_tokens(last.tokens, batch.tokens, batch.runs)
        else:
            self._messages.append(pb.DecodeResponse(tokens=batch))
        self._wake()

    def take(self) -> list[pb.DecodeResponse]:
        """Return what waits; it is the caller's now."""
        messages, self._messages = self._messages, []
        return messages
