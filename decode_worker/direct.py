"""Answers that clients stream straight from this worker.

1. The router mints a capability and gives it to the worker, with the decode call, and to the client. It is valid for
   this answer on this worker, and must be shown within its time to live.
2. The answer's tokens are kept here. The client's stream gets them as they come; a client that reconnects states how
   many tokens it has, and gets the rest. A new stream ends the one before it.
3. The router gets *checkpoints*: the ids of the tokens so far, after the first one and then at intervals. The last one
   is sent when the client has everything, so that an answer whose worker dies earlier is continued elsewhere. The next
   worker has the tokens before the checkpoint too, for a client that they did not reach. A client that does not get
   what was sent last asks a router for it, with the tokens that it has (kvrelay/client/direct.py).
4. If the client does not connect, or does not reconnect, the worker waits for a grace period. Then the call ends with
   ClientGone, which the router sees.

A token is a pure function of seed and index: another worker generates the same tokens after a checkpoint.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence

from common.errors import AccessDenied, ClientGone, InvalidRequest, KvrelayError
from common.sampling import MAX_N
from common.structured import for_each
from common.token_batches import MAX_GATHERED_TOKENS, merge_tokens, num_tokens_in, runs_of
from common.tokens import num_packed
from kvrelay.v1 import decode_pb2 as pb

GRACE_S = 10.0
"""Grace period for a client that left its stream: it may need 5 s to notice that its connection is lost."""
CAPABILITY_BYTES = 32
_MAX_POSITIONS = 1024
"""Positions of a prompt whose log-probabilities are copied at once, in some milliseconds."""

Write = Callable[[pb.StreamTokensResponse], Awaitable[None]]


class DirectAnswer:
    """One answer, with the tokens for its client and the next checkpoint for its router. Event loop only."""

    def __init__(
        self,
        access: pb.DirectAccess,
        samples: range,
        earlier: Sequence[pb.TokenBatch],
        checkpoint: Callable[[pb.TokenBatch], None],
        on_lost: Callable[[KvrelayError], None],
    ) -> None:
        """Start with the tokens that another worker has generated, which the router has.

        `checkpoint` sends tokens to the router; `on_lost` reports that the client is gone. Raises InvalidRequest.
        """
        if len(access.capability) != CAPABILITY_BYTES:
            raise InvalidRequest(
                f"{len(access.capability)} bytes; must be {CAPABILITY_BYTES}", field="direct.capability"
            )
        if access.checkpoint_tokens < 1 or not 0 < access.ttl_s < 3600:
            raise InvalidRequest("checkpoint_tokens and ttl_s must be positive", field="direct")
        self.capability = access.capability
        self._samples = samples
        self._checkpoint_tokens = access.checkpoint_tokens
        self._checkpoint = checkpoint
        self._on_lost = on_lost
        self._unreported = pb.TokenBatch()
        self._num_unreported = 0
        self._num_until_report = 1
        """The first token is sent at once: the time to the first token is measured by it."""
        self._batches = list(earlier)
        self._is_complete = False
        self._error: KvrelayError | None = None
        self._reader: asyncio.Event | None = None
        """Wakes the connected stream."""
        loop = asyncio.get_running_loop()
        self._delivered: asyncio.Future[None] = loop.create_future()
        self._patience = loop.call_later(access.ttl_s, self._lose_patience)

    # For the call that generates the answer.

    def put(self, batch: pb.TokenBatch) -> None:
        """Take new tokens."""
        self._batches.append(batch)
        self._wake()
        runs = [*runs_of(batch.tokens), *batch.runs]
        merge_tokens(self._unreported, (), runs)
        self._unreported.prefill_s = self._unreported.prefill_s or batch.prefill_s
        self._unreported.num_drafted_tokens += batch.num_drafted_tokens
        self._unreported.num_accepted_tokens += batch.num_accepted_tokens
        self._unreported.num_pinned_tokens += batch.num_pinned_tokens
        self._num_unreported += sum(num_packed(run.tokens) for run in runs)
        if self._num_unreported >= self._num_until_report:
            self._report_unfinished()

    async def delivered(self) -> None:
        """Wait until the client has all tokens, once every sample has ended; notify the router. Raises ClientGone."""
        self._is_complete = True
        self._wake()
        if not self._batches and not self._delivered.done():
            self._delivered.set_result(None)
        await self._delivered
        if self._unreported.runs:
            self._checkpoint(self._unreported)

    @property
    def is_delivered(self) -> bool:
        """Whether the client has everything."""
        return self._delivered.done() and not self._delivered.cancelled() and self._delivered.exception() is None

    def close(self, error: KvrelayError) -> None:
        """End the answer: it is over, or will not be finished here."""
        self._patience.cancel()
        self._error = error
        self._delivered.cancel()
        self._wake()

    # For the client.

    async def stream(self, num_received: Sequence[int], write: Write) -> None:
        """Send the tokens that the client does not have until the answer is complete. Raises KvrelayError.

        `num_received` may count samples that are answered elsewhere: after a loss each sample has its own call.
        """
        if len(num_received) > MAX_N:
            raise InvalidRequest(f"{len(num_received)} counts; at most {MAX_N}", field="num_received")
        self._wake()  # ends the stream before this one
        mine = self._reader = asyncio.Event()
        self._patience.cancel()
        has_everything = False
        try:
            num_sent = 0
            while not has_everything:
                if self._error is not None:
                    raise self._error
                if self._reader is not mine:
                    raise AccessDenied("another stream has replaced this one")
                if num_sent < len(self._batches):
                    batches = _portion(self._batches[num_sent:])
                    num_sent += len(batches)
                    message = pb.StreamTokensResponse()
                    await _fill(message.tokens, batches, num_received)
                    if message.tokens.tokens or message.tokens.runs:
                        await write(message)
                elif self._is_complete:
                    has_everything = True
                else:
                    mine.clear()
                    await mine.wait()
        finally:
            if self._reader is mine:
                self._reader = None
                if has_everything and not self._delivered.done():
                    self._delivered.set_result(None)
                elif self._error is None:
                    self._patience = asyncio.get_running_loop().call_later(GRACE_S, self._lose_patience)

    def _wake(self) -> None:
        if self._reader is not None:
            self._reader.set()

    def _report_unfinished(self) -> None:
        """Send the router a checkpoint, without the ends of samples: those wait until the client has them."""
        reported, ended = self._unreported, pb.TokenBatch()
        merge_tokens(ended, (), [run for run in reported.runs if run.finish_reason])
        for position in reversed(range(len(reported.runs))):
            if reported.runs[position].finish_reason:
                del reported.runs[position]
        self._unreported = ended
        self._num_unreported, self._num_until_report = 0, self._checkpoint_tokens
        if reported.runs:
            self._checkpoint(reported)

    def _lose_patience(self) -> None:
        if self._delivered.done():
            return
        error = ClientGone("the client does not take its tokens")
        # `on_lost` comes too late for an answer whose end is on its way, so `delivered` raises the error as well.
        self._delivered.set_exception(error)
        self._delivered.exception()  # it may have no waiter
        if not self._is_complete:
            self._on_lost(error)


class DirectTable:
    """The answers that clients can stream from here. Event loop only."""

    def __init__(self) -> None:
        self._answers: dict[bytes, DirectAnswer] = {}

    def add(self, answer: DirectAnswer) -> None:
        """Let a client stream an answer."""
        self._answers[_key(answer.capability)] = answer

    def remove(self, answer: DirectAnswer) -> None:
        """Stop serving an answer."""
        self._answers.pop(_key(answer.capability), None)

    def claim(self, capability: bytes) -> DirectAnswer:
        """Return the answer of a capability. Raises AccessDenied.

        The lookup by digest and the comparison in constant time reveal nothing about the capabilities that exist.
        """
        answer = self._answers.get(_key(capability))
        if answer is None or not hmac.compare_digest(answer.capability, capability):
            raise AccessDenied("the capability is not valid here, or no longer")
        return answer


def _key(capability: bytes) -> bytes:
    return hashlib.sha256(capability).digest()


def _portion(batches: Sequence[pb.TokenBatch]) -> Sequence[pb.TokenBatch]:
    """Return as many batches as fit one message, at least one."""
    num_tokens = 0
    for position, batch in enumerate(batches):
        num_tokens += num_tokens_in(batch.tokens, batch.runs)
        if position and num_tokens > MAX_GATHERED_TOKENS:
            return batches[:position]
    return batches


async def _fill(merged: pb.TokenBatch, batches: Sequence[pb.TokenBatch], num_received: Sequence[int]) -> None:
    """Merge the tokens that the client does not have into one batch."""

    def received(sample_index: int) -> int:
        return num_received[sample_index] if sample_index < len(num_received) else 0

    for batch in batches:
        tokens = [token for token in batch.tokens if token.token_index >= received(token.sample_index)]
        runs = [
            run for run in batch.runs if run.first_token_index + num_packed(run.tokens) > received(run.sample_index)
        ]
        merge_tokens(merged, tokens, runs)
        # In parts: those of a long prompt take some 10 ms.
        positions = batch.prompt_logprobs
        parts = (positions[first : first + _MAX_POSITIONS] for first in range(0, len(positions), _MAX_POSITIONS))
        await for_each(parts, merged.prompt_logprobs.extend)
        merged.prefill_s = merged.prefill_s or batch.prefill_s
