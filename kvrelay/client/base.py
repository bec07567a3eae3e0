"""Everything that the blocking and the asyncio client share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, Unpack

from kvrelay.client.chat import ChatTurn
from kvrelay.client.collect import EventBuffer
from kvrelay.client.events import SampleSoFar
from kvrelay.client.failover import RouterList, countdown
from kvrelay.client.requests import (
    GenerateOptions,
    Prompt,
    as_conversation,
    credentials,
    generate_request,
    trace_context,
)
from kvrelay.client.traffic import TrafficBuffer
from kvrelay.v1 import inference_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"
_Stream = TypeVar("_Stream")
_Recording = TypeVar("_Recording")
_Answer = TypeVar("_Answer")
TimeLeft = Callable[[], float | None]


class BaseClient(ABC, Generic[_Stream, _Recording, _Answer]):
    """The routers, the deadline and the API key of a client, and the calls that return streams."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        streams: tuple[Callable[..., _Stream], Callable[..., _Recording]],
        *,
        timeout_s: float | None,
        api_key: str | None,
        max_attempts: int | None,
    ) -> None:
        """`streams` are the classes of the streams of an answer and of a recording."""
        self._open_stream, self._open_recording = streams
        self._routers = RouterList(addresses, max_attempts=max_attempts)
        self._timeout_s = timeout_s
        self._metadata = credentials(api_key)
        self._is_direct = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """All routers that the client knows."""
        return self._routers.addresses

    @property
    def address(self) -> str:
        """The router that calls go to."""
        return self._routers.current

    @abstractmethod
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> _Answer:
        """Return the complete answer to text, token ids or a conversation. Raises KvrelayError."""

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> _Stream:
        """Send the request and return its events. Raises InvalidRequest for values that cannot be sent."""
        request, time_left = generate_request(prompt, options), self._time_left(options.get("timeout_s"))
        request.direct = self._is_direct
        metadata = self._call_metadata()

        def send(address: str, request: inference_pb2.GenerateRequest, so_far: Sequence[SampleSoFar]) -> Any:
            call = self._stub(address).Generate(request, timeout=time_left(), metadata=metadata)
            return self._reading(call, request, so_far)

        return self._open_stream(send, request, self._routers, EventBuffer())

    def chat(self, messages: str | Sequence[ChatTurn], **options: Unpack[GenerateOptions]) -> _Answer:
        """Return the assistant's complete answer to a conversation; a string is a single turn of the user."""
        return self.generate(as_conversation(messages), **options)

    def stream_chat(self, messages: str | Sequence[ChatTurn], **options: Unpack[GenerateOptions]) -> _Stream:
        """Return the events of the assistant's answer; a string is a single turn of the user."""
        return self.stream(as_conversation(messages), **options)

    def record(self, *, duration_s: float | None = None) -> _Recording:
        """Record the caller's requests as they come: arrival, lengths and shared beginnings, without content.

        Requests that come after the call are recorded; with `duration_s` those that come within it, and the stream
        ends when the last of them has ended. The recording has no deadline, and stays with its router.
        """

        def send(address: str, request: inference_pb2.RecordTrafficRequest, _: Sequence[SampleSoFar]) -> Any:
            return self._stub(address).RecordTraffic(request, metadata=self._metadata)

        request = inference_pb2.RecordTrafficRequest(duration_s=duration_s or 0.0)
        return self._open_recording(send, request, self._routers.only_current(), TrafficBuffer())

    def _call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call that begins now."""
        return self._metadata + trace_context()

    @abstractmethod
    def _stub(self, address: str) -> Any:
        """Return the stub of the router at an address."""

    def _reading(self, call: Any, request: inference_pb2.GenerateRequest, so_far: Sequence[SampleSoFar]) -> Any:
        """Return the call that the stream reads: the given one, unless tokens come from elsewhere."""
        return call

    def _time_left(self, timeout_s: float | None) -> TimeLeft:
        """Start the deadline of a call."""
        return countdown(self._timeout_s if timeout_s is None else timeout_s)
