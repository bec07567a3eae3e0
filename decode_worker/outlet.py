"""What a call has to say and nobody has taken yet."""

from collections.abc import Callable

from common.token_batches import MAX_GATHERED_TOKENS, merge_tokens, num_tokens_in
from kvrelay.v1 import decode_pb2 as pb

MAX_TAKEN = 4
"""Messages that are taken at once."""


class Outlet:
    """A call's messages, in order. While nobody takes them, tokens gather in few messages. Event loop only.

    So a reader that is slow, or gone for a while, costs memory for the tokens themselves, of which a request has at
    most `max_tokens` per sample, and slows nobody else. No message becomes too large to be sent.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` hears of every new message."""
        self._messages: list[pb.DecodeResponse] = []
        self._num_gathered = 0
        """Tokens of the last message."""
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
        num_new = num_tokens_in(batch.tokens, batch.runs)
        if last is not None and last.HasField("tokens") and self._num_gathered + num_new <= MAX_GATHERED_TOKENS:
            merge_tokens(last.tokens, batch.tokens, batch.runs)
            self._num_gathered += num_new
        else:
            self._messages.append(pb.DecodeResponse(tokens=batch))
            self._num_gathered = num_new
        self._wake()

    def take(self) -> list[pb.DecodeResponse]:
        """Return the first `MAX_TAKEN` messages that wait; they are the caller's now."""
        taken, self._messages = self._messages[:MAX_TAKEN], self._messages[MAX_TAKEN:]
        return taken
