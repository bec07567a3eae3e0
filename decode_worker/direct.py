"""Answers that clients stream straight from this worker.

1. The router mints a capability, gives it to the worker with the Decode call and to the client. It is good for this
   answer on this worker only, and has to be shown within its time to live.
2. The answer's tokens are kept here. The client's stream gets them as they come; a client that comes back names how
   many tokens it has, and gets those behind them. One stream at a time: a new one ends the one before it.
3. The router gets *checkpoints*: the ids of the tokens so far, after the first one and then every so many. The last one
   goes out when the client has got everything, so that an answer whose worker dies before is taken up elsewhere.
4. A client that does not come, or leaves and does not come back, is waited for a little. Then the call ends with
   ClientGone, and the router hears of it.

A token is a pure function of seed and index: what another worker generates again behind a checkpoint is the same.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence

from common.errors import AccessDenied, ClientGone, InvalidRequest, KvrelayError
from common.sampling import MAX_N
from common.token_batches import MAX_GATHERED_TOKENS, merge_tokens, num_tokens_in, runs_of
from kvrelay.v1 import decode_pb2 as pb

GRACE_S = 5.0
"""How long a client that left its stream is waited for."""
CAPABILITY_BYTES = 32

Write = Callable[[pb.StreamTokensResponse], Awaitable[None]]


class DirectAnswer:
    """One answer: what its client has still to get, and what its router has still to hear. Event loop only."""

    def __init__(
        self,
        access: pb.DirectAccess,
        samples: range,
        checkpoint: Callable[[pb.TokenBatch], None],
        on_lost: Callable[[KvrelayError], None],
    ) -> None:
        """`checkpoint` takes what the router hears; `on_lost` hears that the client is gone. Raises InvalidRequest."""
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
        self._untold = pb.TokenBatch()
        self._num_untold = 0
        self._num_until_told = 1
        """The router hears of the first token at once: it is what the time to the first token is measured by."""
        self._batches: list[pb.TokenBatch] = []
        self._is_complete = False
        self._error: KvrelayError | None = None
        self._reader: asyncio.Event | None = None
        """Wakes the stream that is connected."""
        loop = asyncio.get_running_loop()
        self._delivered: asyncio.Future[None] = loop.create_future()
        self._patience = loop.call_later(access.ttl_s, self._lose_patience)

    # For the call that generates the answer.

    def put(self, batch: pb.TokenBatch) -> None:
        """Take new tokens."""
        self._batches.append(batch)
        self._wake()
        runs = [*runs_of(batch.tokens), *batch.runs]
        merge_tokens(self._untold, (), runs)
        self._untold.prefill_s = self._untold.prefill_s or batch.prefill_s
        self._num_untold += sum(len(run.tokens) // 4 for run in runs)
        if self._num_untold >= self._num_until_told:
            self._tell_unfinished()

    async def delivered(self) -> None:
        """Every sample has ended: wait until the client has everything, then tell the router. Raises ClientGone."""
        self._is_complete = True
        self._wake()
        if not self._batches and not self._delivered.done():
            self._delivered.set_result(None)
        await self._delivered
        if self._untold.runs:
            self._checkpoint(self._untold)

    @property
    def is_delivered(self) -> bool:
        """Whether the client has got everything."""
        return self._delivered.done() and not self._delivered.cancelled() and self._delivered.exception() is None

    def close(self, error: KvrelayError) -> None:
        """The answer is over, or will not be finished here: nobody is waited for any more."""
        self._patience.cancel()
        self._error = error
        self._delivered.cancel()
        self._wake()

    # For the client.

    async def stream(self, num_received: Sequence[int], write: Write) -> None:
        """Send what the client lacks until the answer is complete. Raises KvrelayError.

        Counts of samples that are answered elsewhere are ignored: after a loss each of them has a call of its own.
        """
        if len(num_received) > MAX_N:
            raise InvalidRequest(f"{len(num_received)} counts; at most {MAX_N}", field="num_received")
        self._wake()  # a stream before this one ends
        mine = self._reader = asyncio.Event()
        self._patience.cancel()
        has_everything = False
        try:
            num_sent = 0
            while not has_everything:
                if self._error is not None:
                    raise self._error
                if self._reader is not mine:
                    raise AccessDenied("another stream has taken this one's place")
                if num_sent < len(self._batches):
                    batches = _portion(self._batches[num_sent:])
                    num_sent += len(batches)
                    batch = _behind(batches, num_received)
                    if batch is not None:
                        await write(pb.StreamTokensResponse(tokens=batch))
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

    def _tell_unfinished(self) -> None:
        """Give the router a checkpoint. It hears of a sample's end when the client has it, not before."""
        told, ended = self._untold, pb.TokenBatch()
        merge_tokens(ended, (), [run for run in told.runs if run.finish_reason])
        for position in reversed(range(len(told.runs))):
            if told.runs[position].finish_reason:
                del told.runs[position]
        self._untold = ended
        self._num_untold, self._num_until_told = 0, self._checkpoint_tokens
        if told.runs:
            self._checkpoint(told)

    def _lose_patience(self) -> None:
        if self._delivered.done():
            return
        error = ClientGone("the client does not take its tokens")
        if self._is_complete:
            self._delivered.set_exception(error)
        else:
            self._on_lost(error)


class DirectTable:
    """The answers that can be streamed from here. Event loop only."""

    def __init__(self) -> None:
        self._answers: dict[bytes, DirectAnswer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: DirectAnswer) -> None:
        """Let a client come for an answer."""
        self._answers[_key(answer.capability)] = answer

    def remove(self, answer: DirectAnswer) -> None:
        """Nobody may come any more."""
        self._answers.pop(_key(answer.capability), None)

    def claim(self, capability: bytes) -> DirectAnswer:
        """Return the answer that a capability is good for. Raises AccessDenied.

        Found by a digest and compared in constant time: how long it takes tells nothing of those that exist.
        """
        answer = self._answers.get(_key(capability))
        if answer is None or not hmac.compare_digest(answer.capability, capability):
            raise AccessDenied("the capability is not valid here (any more)")
        return answer


def _key(capability: bytes) -> bytes:
    return hashlib.sha256(capability).digest()


def _portion(batches: Sequence[pb.TokenBatch]) -> Sequence[pb.TokenBatch]:
    """Return the first batches, at least one, as many as one message may gather."""
    num_tokens = 0
    for position, batch in enumerate(batches):
        num_tokens += num_tokens_in(batch.tokens, batch.runs)
        if position and num_tokens > MAX_GATHERED_TOKENS:
            return batches[:position]
    return batches


def _behind(batches: Sequence[pb.TokenBatch], num_received: Sequence[int]) -> pb.TokenBatch | None:
    """Return the tokens of all batches as one, less those that the client has; None when none is left."""

    def received(sample_index: int) -> int:
        return num_received[sample_index] if sample_index < len(num_received) else 0

    merged = pb.TokenBatch()
    for batch in batches:
        tokens = [token for token in batch.tokens if token.token_index >= received(token.sample_index)]
        runs = [run for run in batch.runs if run.first_token_index + len(run.tokens) // 4 > received(run.sample_index)]
        merge_tokens(merged, tokens, runs)
        merged.prompt_logprobs.extend(batch.prompt_logprobs)
        merged.prefill_s = merged.prefill_s or batch.prefill_s
    return merged if merged.tokens or merged.runs else None
