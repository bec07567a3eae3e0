"""Answers whose tokens come straight from the decode workers; a reader sees no difference.

The router's call still brings plans, the end, and the first tokens of a remote plan. A DirectGrant names the worker
that has the other tokens; after the loss of a worker another grant follows. Every token is taken once and in order,
from any stream: repeated tokens are dropped, early ones wait, and the end waits for the last token. A worker takes what
it has written for delivered; tokens that are lost with it after that are requested from a router (TailLost).
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from common.errors import Cancelled, EngineFault
from kvrelay.client.events import SampleSoFar
from kvrelay.v1 import decode_pb2, inference_pb2, sampling_pb2

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_TAIL_TIMEOUT_S = 10.0
"""As long as a worker keeps an answer that it has sent: a connection that was lost is noticed after 5 s."""


class TailLost(Exception):
    """The router's call has ended well, and tokens that the worker had written have not come."""


Piece = sampling_pb2.SampleToken | sampling_pb2.TokenRun


class InOrder:
    """Merges the tokens of several streams into one answer."""

    def __init__(self, num_samples: int, so_far: Sequence[SampleSoFar] = ()) -> None:
        """`so_far` has arrived through another router and is not repeated."""
        self._next = [0] * num_samples
        for index, sample in enumerate(so_far):
            self._next[index] = len(sample.token_ids)
        self._early: list[dict[int, Piece]] = [{} for _ in range(num_samples)]
        self._num_finished = sum(sample.is_finished for sample in so_far)
        self._has_prompt_logprobs = False

    @property
    def num_received(self) -> list[int]:
        """Number of tokens of each sample so far."""
        return self._next

    @property
    def is_complete(self) -> bool:
        """Whether every sample has ended."""
        return self._num_finished == len(self._next)

    @property
    def has_early(self) -> bool:
        """Whether a token waits for one before it."""
        return any(self._early)

    def take(
        self, tokens: decode_pb2.TokenBatch | inference_pb2.TokenDelta
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Yield the tokens that are next in order. Raises EngineFault for a sample that was not requested."""
        if not self._has_prompt_logprobs and tokens.prompt_logprobs:
            self._has_prompt_logprobs = True
            delta = inference_pb2.TokenDelta(prompt_logprobs=tokens.prompt_logprobs)
            yield inference_pb2.GenerateResponse(tokens=delta)
        pieces: list[Piece] = [*tokens.tokens, *tokens.runs]
        for piece in pieces:
            if piece.sample_index >= len(self._next):
                raise EngineFault(f"a token of sample {piece.sample_index}; there are {len(self._next)}")
            early, first = self._early[piece.sample_index], _first(piece)
            if first not in early or _length(early[first]) < _length(piece):
                early[first] = piece
            yield from self._release(piece.sample_index)

    def _release(self, sample_index: int) -> Iterator[inference_pb2.GenerateResponse]:
        """Yield the early pieces that are next in order."""
        early = self._early[sample_index]
        while early and (first := min(early)) <= self._next[sample_index]:
            piece, position = early.pop(first), self._next[sample_index]
            end = first + _length(piece)
            if end <= position:
                continue
            self._next[sample_index] = end
            self._num_finished += piece.finish_reason != sampling_pb2.FINISH_REASON_UNSPECIFIED
            delta = inference_pb2.TokenDelta()
            if isinstance(piece, sampling_pb2.SampleToken):
                delta.tokens.append(piece)
            else:
                delta.runs.add(
                    sample_index=sample_index,
                    first_token_index=position,
                    tokens=piece.tokens[4 * (position - first) :],
                    finish_reason=piece.finish_reason,
                )
            yield inference_pb2.GenerateResponse(tokens=delta)


class DirectCall:
    """A Generate call whose tokens come from the workers: iterated and cancelled like the call itself."""

    def __init__(
        self,
        call: "grpc.aio.UnaryStreamCall[Any, inference_pb2.GenerateResponse]",
        connect: Callable[[inference_pb2.DirectGrant], Any],
        *,
        num_samples: int,
        so_far: Sequence[SampleSoFar] = (),
    ) -> None:
        """`connect` returns the DirectService stub of the worker that a grant names. Starts reading at once."""
        self._call = call
        self._connect = connect
        self._answer = InOrder(num_samples, so_far)
        self._inbox: asyncio.Queue[inference_pb2.GenerateResponse | BaseException | None] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read_router())]  # a list: a simulation can be repeated

    def __aiter__(self) -> "DirectCall":
        return self

    async def __anext__(self) -> inference_pb2.GenerateResponse:
        message = await self._inbox.get()
        if isinstance(message, inference_pb2.GenerateResponse):
            return message
        self._stop()
        if message is None:
            raise StopAsyncIteration
        raise message

    def done(self) -> bool:
        """Whether the router's call is over."""
        return self._call.done()

    def cancel(self) -> bool:
        """Cancel the router's call, and with it everything."""
        self._stop()
        return self._call.cancel()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _read_router(self) -> None:
        completed: inference_pb2.GenerateResponse | None = None
        try:
            async for message in self._call:
                if message.HasField("direct"):
                    self._tasks.append(asyncio.create_task(self._read_worker(message.direct)))
                elif message.HasField("tokens"):
                    self._take(message.tokens)
                elif message.HasField("completed"):
                    completed = message
                else:
                    self._inbox.put_nowait(message)
            if completed is not None:
                await self._last_token()
                self._inbox.put_nowait(completed)
            self._inbox.put_nowait(None)
        except (grpc.aio.AioRpcError, EngineFault, TailLost) as error:
            self._inbox.put_nowait(error)
        except asyncio.CancelledError:  # of the call, by another task that closed the client, or of this task
            self._inbox.put_nowait(Cancelled("the client was closed during the call"))

    async def _last_token(self) -> None:
        """Wait for the last token, which the worker keeps that long. Raises TailLost when it does not come."""
        try:
            async with asyncio.timeout(_TAIL_TIMEOUT_S):
                while not self._answer.is_complete:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TailLost from None

    async def _read_worker(self, grant: inference_pb2.DirectGrant) -> None:
        """Read tokens from a worker. Failures are retried: the router decides when the worker is lost."""
        pause_s = _FIRST_PAUSE_S
        while True:
            request = decode_pb2.StreamTokensRequest(
                capability=grant.capability, num_received=self._answer.num_received
            )
            stream = self._connect(grant).StreamTokens(request)
            try:
                async for message in stream:
                    pause_s = _FIRST_PAUSE_S
                    self._take(message.tokens)
                if not self._answer.has_early:
                    return  # else a token is missing that the worker has sent
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                    return  # the worker has ended the answer: another grant follows, or the end
            except EngineFault as error:
                self._inbox.put_nowait(error)
                return
            finally:
                stream.cancel()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _take(self, tokens: decode_pb2.TokenBatch | inference_pb2.TokenDelta) -> None:
        for message in self._answer.take(tokens):
            self._inbox.put_nowait(message)
        self._changed.set()


def _first(piece: Piece) -> int:
    return piece.token_index if isinstance(piece, sampling_pb2.SampleToken) else piece.first_token_index


def _length(piece: Piece) -> int:
    return 1 if isinstance(piece, sampling_pb2.SampleToken) else len(piece.tokens) // 4
