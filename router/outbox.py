"""The queue of messages to one client.

`put` never waits, so a token that was counted as delivered cannot be lost to a cancellation at the same moment. While
the client's stream is busy or the client is slow, tokens gather in few messages: under load, messages become fewer and
larger, and a client that does not read delays nothing else. The memory of an outbox is bounded by the tokens that its
client asked for, and a message by what can be sent at once.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from common.errors import KvrelayError
from common.token_batches import MAX_GATHERED_TOKENS, merge_tokens, num_tokens_in
from kvrelay.v1 import inference_pb2, sampling_pb2


class Outbox:
    """A queue between a request and its client's stream, with one reader. Event loop only."""

    def __init__(self) -> None:
        self._messages: deque[inference_pb2.GenerateResponse] = deque()
        self._delta: inference_pb2.TokenDelta | None = None
        """Delta of the last message if that has tokens; further tokens are added to it."""
        self._num_gathered = 0
        """Tokens in the delta."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self._error: KvrelayError | None = None

    def put(self, message: inference_pb2.GenerateResponse) -> None:
        """Append a message."""
        assert not self._is_closed, "a message after the end"
        self._messages.append(message)
        self._delta = None
        self._wake()

    def put_tokens(
        self,
        tokens: Sequence[sampling_pb2.SampleToken],
        runs: Sequence[sampling_pb2.TokenRun],
        prompt_logprobs: Sequence[sampling_pb2.PositionLogprobs] = (),
    ) -> None:
        """Append tokens."""
        assert not self._is_closed, "tokens after the end"
        num_new = num_tokens_in(tokens, runs)
        if self._delta is None or self._num_gathered + num_new > MAX_GATHERED_TOKENS:
            message = inference_pb2.GenerateResponse()
            self._delta = message.tokens
            self._messages.append(message)
            self._num_gathered = 0
            self._wake()
        self._num_gathered += num_new
        merge_tokens(self._delta, tokens, runs)
        if prompt_logprobs:
            self._delta.prompt_logprobs.extend(prompt_logprobs)

    def close(self, error: KvrelayError | None) -> None:
        """End the stream, successfully or with an error."""
        self._is_closed = True
        self._error = error
        self._wake()

    async def get(self) -> inference_pb2.GenerateResponse | None:
        """Return the next message, or None at the end; then `error` tells how the request ended."""
        while not self._messages:
            if self._is_closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._messages.popleft()
        if not self._messages:
            self._delta = None  # the message belongs to the reader now
        return message

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def error(self) -> KvrelayError | None:
        """Error of a failed request; None while it runs and after success."""
        return self._error
