"""Recordings of live traffic: lengths, times and shared beginnings of requests, without content."""

import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Self

import grpc

from common.errors import Cancelled
from kvrelay.client.base import unless_closed
from kvrelay.client.convert import error_from_rpc
from kvrelay.v1 import inference_pb2

_KEY_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request that has ended."""

    arrival_s: float
    """Time since the recording began."""
    num_prompt_tokens: int
    num_output_tokens: float
    """Mean over its samples."""
    outcome: str
    """"completed", "cancelled", or the name of an error class."""
    block_size: int
    block_keys: tuple[int, ...]
    """One key for each block of the prompt, a partly filled last one included. In one recording, equal keys mean that
    the prompts are equal up to the ends of these blocks."""


class _Feed:
    """State of a recording: its call, and how far it has been read."""

    def __init__(self, call: Any, *, address: str) -> None:
        """`call` yields messages and has cancel(); for a blocking one grpc has no public type."""
        self.num_dropped = 0
        """Requests that are missing so far, because the recording was read too slowly."""
        self._call = call
        self._address = address
        self._has_begun = False
        self._has_ended = False

    def _take(self, message: inference_pb2.RecordTrafficResponse | None) -> RecordedRequest | None:
        if message is None:
            self._has_ended = True
            return None
        self._has_begun = True
        self.num_dropped = message.num_dropped
        return _request(message.request) if message.HasField("request") else None

    def _fail(self, error: grpc.RpcError) -> None:
        """Raise the typed error, unless the recording was closed while it was being read."""
        if not self._has_ended:
            self._has_ended = True
            raise error_from_rpc(error, address=self._address) from None

    def _end(self) -> None:
        self._has_ended = True
        self._call.cancel()


class TrafficStream(_Feed, Iterator[RecordedRequest]):
    """Requests in order of their ends. Entering its `with` block waits until the recording has begun; leaving ends it.

    Iterate in one thread; `close` from any.
    """

    def __next__(self) -> RecordedRequest:
        """Return the next request. Raises StopIteration at the end and after `close`, KvrelayError on failure."""
        while (request := self._read()) is None:
            if self._has_ended:
                raise StopIteration
        return request

    def close(self) -> None:
        """End the recording. Repeating it is harmless."""
        self._end()

    def _read(self) -> RecordedRequest | None:
        try:
            return self._take(None if self._has_ended else next(self._call, None))
        except grpc.RpcError as error:
            self._fail(error)
            return None

    def __enter__(self) -> Self:
        if not self._has_begun:
            self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTrafficStream(_Feed, AsyncIterator[RecordedRequest]):
    """Requests in order of their ends. Entering its `async with` block waits until the recording has begun, leaving it
    ends it. Belongs to the event loop that made it.
    """

    async def __anext__(self) -> RecordedRequest:
        """Return the next request. Raises StopAsyncIteration at the end and after `aclose`, KvrelayError on failure."""
        while (request := await self._read()) is None:
            if self._has_ended:
                raise StopAsyncIteration
        return request

    async def aclose(self) -> None:
        """End the recording. Repeating it is harmless."""
        self._end()

    async def _read(self) -> RecordedRequest | None:
        try:
            return self._take(None if self._has_ended else await unless_closed(anext(aiter(self._call), None)))
        except grpc.RpcError as error:
            self._fail(error)
            return None
        except Cancelled:
            if not self._has_ended:
                raise
            return None

    async def __aenter__(self) -> Self:
        if not self._has_begun:
            await self._read()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _request(message: inference_pb2.RecordedRequest) -> RecordedRequest:
    num_keys = len(message.block_keys) // _KEY_BYTES
    return RecordedRequest(
        arrival_s=message.arrival_s,
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        outcome=message.outcome,
        block_size=message.block_size,
        block_keys=struct.unpack(f"<{num_keys}Q", message.block_keys),
    )
