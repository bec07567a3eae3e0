"""Messages of a call that wait to be sent."""

from collections.abc import Callable

from common.token_batches import MAX_GATHERED_TOKENS, merge_tokens, num_tokens_in
from kvrelay.v1 import decode_pb2 as pb

MAX_TAKEN = 4
"""Messages that are taken at once."""


class Outlet:
    """A call's messages, in order. Tokens that wait are merged into few messages. Event loop only.

    A slow reader costs the memory of its tokens, at most `max_tokens` per sample, and slows no other call. No message
    becomes too large to be sent.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called for every new message."""
        self._messages: list[pb.DecodeResponse] = []
        self._num_gathered = 0
        """Tokens of the last message."""
        self._wake = wake

    @property
    def is_empty(self) -> bool:
        """Whether no message waits."""
        return not self._messages

    def put(self, message: pb.DecodeResponse) -> None:
        """Append a message."""
        self._messages.append(message)
        self._wake()

    def put_tokens(self, batch: pb.TokenBatch) -> None:
        """Append new tokens."""
        last = self._messages[-1] if self._messages else None
        num_new = num_tokens_in(batch.tokens, batch.runs)
        if last is not None and last.HasField("tokens") and self._num_gathered + num_new <= MAX_GATHERED_TOKENS:
            merge_tokens(last.tokens, batch.tokens, batch.runs)
            self._num_gathered += num_new
        else:
            self._messages.append(pb.DecodeResponse(tokens=batch))
            self._num_gathered = num_new
        self._wake()

    def take(self) -> list[pb.DecodeResponse]:
        """Remove and return the first `MAX_TAKEN` messages."""
        taken, self._messages = self._messages[:MAX_TAKEN], self._messages[MAX_TAKEN:]
        return taken
