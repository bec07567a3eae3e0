"""Recordings of live traffic: lengths, times and shared beginnings of requests, without content."""

import struct
from dataclasses import dataclass
from typing import Self

from kvrelay.client.streams import AsyncStream, BlockingStream, Buffer
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


class TrafficBuffer(Buffer[RecordedRequest]):
    """Requests of a recording that have arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = False
        self.num_dropped = 0

    def feed(self, message: inference_pb2.RecordTrafficResponse) -> bool:
        """Take one message."""
        self.has_begun = True
        self.num_dropped = message.num_dropped
        if message.HasField("request"):
            self._pending.append(_request(message.request))
        return True


class TrafficStream(BlockingStream[RecordedRequest]):
    """Requests in order of their ends. Entering its `with` block waits until the recording has begun; leaving ends it.

    Iterate in one thread; `close` from any.
    """

    _events: TrafficBuffer

    @property
    def num_dropped(self) -> int:
        """Requests that are missing so far, because the recording was read too slowly."""
        return self._events.num_dropped

    def __enter__(self) -> Self:
        if not self._events.has_begun:
            self._read()
        return self


class AsyncTrafficStream(AsyncStream[RecordedRequest]):
    """Requests in order of their ends. Entering its `async with` block waits until the recording has begun, leaving it
    ends it. Belongs to the event loop that made it.
    """

    _events: TrafficBuffer

    @property
    def num_dropped(self) -> int:
        """Requests that are missing so far, because the recording was read too slowly."""
        return self._events.num_dropped

    async def __aenter__(self) -> Self:
        if not self._events.has_begun:
            await self._read()
        return self


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
