"""The queue of messages to one client.

`put` never waits, so a token that was counted as delivered cannot be lost to a cancellation at the same moment. While
the client's stream is busy or the client is slow, tokens gather in few messages: under load, messages become fewer and
larger, and a client that does not read delays nothing else. The memory of an outbox is bounded by the tokens that its
client asked for, and a message by what is formatted within some milliseconds; a large one waits for its tenant's turn.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import KvrelayError, Refused
from common.structured import for_each
from common.token_batches import merge_tokens, num_tokens_in
from kvrelay.v1 import inference_pb2, sampling_pb2
from router.record.budget import Holding
from router.record.embedding import Floats

MAX_ENTRIES = 1024
"""Most tokens and log-probabilities in one message, unless a single token has more."""
LARGE_ENTRIES = 256
"""Number from which on formatting a message takes about a millisecond."""


def num_entries_in(delta: inference_pb2.TokenDelta) -> int:
    """Return the number of tokens and log-probabilities of a message."""
    return len(delta.tokens) * _entries_a_token(delta.tokens) + _entries_of_prompt(delta.prompt_logprobs)


def _entries_a_token(tokens: Sequence[sampling_pb2.SampleToken]) -> int:
    """Return what each of the tokens counts, all of which have equally many log-probabilities."""
    return 1 + len(tokens[0].logprobs.top) if tokens else 1


def _entries_of_prompt(positions: Sequence[sampling_pb2.PositionLogprobs]) -> int:
    """Return the number of a prompt's log-probabilities; the last position has as many as any."""
    return len(positions) * (1 + len(positions[-1].top)) if positions else 0


@dataclass(slots=True)
class _Waiting:
    """A message that waits, and its number of tokens and log-probabilities."""

    message: inference_pb2.GenerateResponse
    num_entries: int = 0
    prompt_logprobs: Sequence[sampling_pb2.PositionLogprobs] = ()
    """Log-probabilities that the message gets when it is taken: many take some ten milliseconds to copy."""


async def _at_once() -> None:
    """Return."""


def _ignored() -> None:
    """Return."""


class Outbox:
    """A queue between a request and its client's stream, with one reader. Event loop only."""

    def __init__(self) -> None:
        self._messages: deque[_Waiting] = deque()
        self._open: _Waiting | None = None
        """The last message if it has tokens; further tokens are added to it."""
        self._is_behind = False
        """Whether messages waited when the last one was taken."""
        self.on_large: Callable[[], Awaitable[object]] = _at_once
        """Awaited before a large message is taken."""
        self.holding: Holding | None = None
        """Share of the tenant in the bound on entries that wait for slow clients; None: no bound."""
        self.on_overflow: Callable[[], None] = _ignored
        """Called when more would wait than the tenant may have waiting; ends the request."""
        self._overflow: Refused | None = None
        """Set from then on."""
        self._num_entries = 0
        """Entries that wait or are being sent; they are held in steps of `MAX_ENTRIES`, so that a client that reads
        costs nothing."""
        self._num_sending = 0
        """Those of the message that was taken last."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self.embedding: Floats | None = None
        """Answer to a request for an embedding, once it is there."""
        self.error: KvrelayError | None = None
        """Error of a failed request; None while it runs and after success."""

    def put(self, message: inference_pb2.GenerateResponse) -> None:
        """Append a message."""
        assert not self._is_closed, "a message after the end"
        if self._overflow is not None:
            return
        self._messages.append(_Waiting(message))
        self._open = None
        self._wake()

    def put_tokens(
        self,
        tokens: Sequence[sampling_pb2.SampleToken],
        runs: Sequence[sampling_pb2.TokenRun],
        prompt_logprobs: Sequence[sampling_pb2.PositionLogprobs] = (),
    ) -> None:
        """Append tokens."""
        assert not self._is_closed, "tokens after the end"
        entries_a_token = _entries_a_token(tokens)
        most = max(1, MAX_ENTRIES // entries_a_token)
        while len(tokens) > most and self._overflow is None:
            self._add(tokens[:most], (), entries_a_token)
            tokens = tokens[most:]
        if self._overflow is not None:
            return
        last = self._add(tokens, runs, entries_a_token)
        if prompt_logprobs and self._count(last, _entries_of_prompt(prompt_logprobs)):
            last.prompt_logprobs = prompt_logprobs

    def _add(
        self,
        tokens: Sequence[sampling_pb2.SampleToken],
        runs: Sequence[sampling_pb2.TokenRun],
        entries_a_token: int,
    ) -> _Waiting:
        """Add tokens to the last message, or to a new one; returns it."""
        num_new, waiting = num_tokens_in(tokens, runs) * entries_a_token, self._open
        if waiting is None or waiting.num_entries + num_new > MAX_ENTRIES:
            waiting = self._open = _Waiting(inference_pb2.GenerateResponse())
            self._messages.append(waiting)
            self._wake()
        if self._count(waiting, num_new):
            merge_tokens(waiting.message.tokens, tokens, runs)
        return waiting

    def _count(self, waiting: _Waiting, num_new: int) -> bool:
        """Count entries that are added to a message; returns whether the tenant may have so many waiting."""
        waiting.num_entries += num_new
        self._num_entries += num_new
        if self.holding is not None and self._num_entries - self.holding.amount > MAX_ENTRIES:
            refused = self.holding.grow(self._num_entries - self.holding.amount)
            if refused is not None:
                self.overflow(refused)
                return False
        return True

    def overflow(self, refused: Refused) -> None:
        """Drop what waits, and end with a refusal: a client that does not read has no use for it."""
        if self._overflow is not None:
            return
        self._overflow, self._open = refused, None
        self._messages.clear()
        self._num_entries = self._num_sending
        if self._is_closed:
            self.error = refused.error()
        else:
            self.on_overflow()

    def close(self, error: KvrelayError | None) -> None:
        """End the stream, successfully or with an error."""
        self._is_closed = True
        self.error = error if self._overflow is None else self._overflow.error()
        self._wake()

    async def get(self) -> inference_pb2.GenerateResponse | None:
        """Return the next message, or None at the end; then `error` says how the request ended.

        The message before has been sent by then.
        """
        self._num_entries -= self._num_sending
        self._num_sending = 0
        if self.holding is not None and self.holding.amount - self._num_entries > MAX_ENTRIES:
            self.holding.shrink(self.holding.amount - self._num_entries)
        if self._is_behind:
            await asyncio.sleep(0)
        while not self._messages:
            if self._is_closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._messages[0].num_entries >= LARGE_ENTRIES:
            await self.on_large()
            if not self._messages:  # dropped meanwhile
                return await self.get()
        taken = self._messages.popleft()
        self._is_behind = bool(self._messages)
        self._num_sending = taken.num_entries
        if taken is self._open:
            self._open = None  # the message belongs to the reader now
        if positions := taken.prompt_logprobs:
            copied = taken.message.tokens.prompt_logprobs
            parts = (positions[start : start + MAX_ENTRIES] for start in range(0, len(positions), MAX_ENTRIES))
            await for_each(parts, copied.extend)
        return taken.message

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


SAMPLE_S = 0.1
BUSY = 0.85
"""Share of the time that the loop's thread runs, or would with a free core, above which the window grows."""
CALM = 0.45
"""Share below which the window shrinks; the distance keeps the window's own effect from closing it."""
MIN_WINDOW_S = 0.004
MAX_WINDOW_S = 0.032


class MergeWindow:
    """Delays the next message to clients that have just been written to. Event loop only.

    A message to a client costs the router 20 to 40 µs, nearly all of it in gRPC and the kernel, whatever the number of
    its tokens. While the event loop has time, every token goes out at once. When the loop is busy, each client is
    written to once per *window*; tokens in between wait in its outbox as one message. The window doubles while the
    loop stays busy and halves when it is not, so a router under load trades some milliseconds of smoothness for several
    times the tokens.
    """

    def __init__(self) -> None:
        self.window_s = 0.0
        """Length of the window; 0: none."""
        self._end: asyncio.Event | None = None
        """Set at the end of the current window, which all clients share."""

    async def over(self) -> None:
        """Wait for the end of the current window, or begin one. Return at once while there is none."""
        if not self.window_s:
            return
        if self._end is None:
            # First: should this fail, no window may have begun, as nothing would end it.
            asyncio.get_running_loop().call_later(self.window_s, self._finish)
            self._end = asyncio.Event()
        await self._end.wait()

    def adapt(self, busy: float) -> None:
        """Adapt to the share of the last interval in which the loop's thread was busy."""
        if busy > BUSY:
            self.window_s = min(max(2 * self.window_s, MIN_WINDOW_S), MAX_WINDOW_S)
        elif busy < CALM:
            self.window_s = self.window_s / 2 if self.window_s > MIN_WINDOW_S else 0.0

    async def watch(self) -> None:
        """Adapt until cancelled."""
        wall_s, wanted_s = time.monotonic(), _wanted_s()
        while True:
            await asyncio.sleep(SAMPLE_S)
            wall_before_s, wanted_before_s = wall_s, wanted_s
            wall_s, wanted_s = time.monotonic(), _wanted_s()
            self.adapt((wanted_s - wanted_before_s) / (wall_s - wall_before_s))

    def _finish(self) -> None:
        if self._end is not None:
            self._end.set()
            self._end = None


def _wanted_s() -> float:
    """Return how long this thread has run, plus its wait for a core where the kernel reports it."""
    try:
        computed_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(computed_ns) + int(waited_ns)) / 1e9
