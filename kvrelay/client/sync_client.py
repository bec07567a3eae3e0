"""The blocking client, on gRPC's own blocking channel: no event loop, safe to share between threads."""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from common.rpc import channel_options
from kvrelay.client.collect import EventBuffer
from kvrelay.client.convert import (
    decisions_from_proto,
    error_from_rpc,
    models_from_proto,
    status_from_proto,
    tokenization_from_proto,
)
from kvrelay.client.decisions import Decision
from kvrelay.client.records import ChatTurn, Event, Generation, ModelInfo, Prompt, ServiceTerms, Tokenization
from kvrelay.client.requests import SamplingOptions, as_conversation, credentials, generate_request, tokenize_request
from kvrelay.client.status import ClusterStatus
from kvrelay.client.traffic import TrafficStream
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
_T = TypeVar("_T")


class GenerationStream(Iterator[Event]):
    """The events of one request, as they arrive. Iterate in one thread; `close` from any.

    Closing it, leaving its `with` block or dropping the last reference (as `break` does in
    `for event in client.stream(…)`) cancels the request at once: the cluster stops computing it.
    """

    def __init__(self, call: Any, *, address: str) -> None:
        self._call = call  # of a type that grpc keeps private: an iterator with cancel()
        self._address = address
        self._events = EventBuffer()

    def __next__(self) -> Event:
        """Return the next event. Raises StopIteration at the end and after `close`, KvrelayError on failure."""
        while (event := self._events.take()) is None:
            if self._events.has_ended:
                raise StopIteration
            try:
                self._read()
            except BaseException:
                self.close()
                raise
        return event

    def result(self) -> Generation:
        """Read the rest and return the whole answer. Raises Cancelled when the stream was closed before its end."""
        for _ in self:
            pass
        return self._events.build()

    def close(self) -> None:
        """Cancel the request unless it has ended. Repeating it is harmless."""
        if not self._events.has_ended:
            self._events.drop()
            self._call.cancel()

    def _read(self) -> None:
        try:
            message = next(self._call, None)
        except grpc.RpcError as error:
            if self._events.has_ended:  # closed by another thread while this one was reading
                return
            raise error_from_rpc(error, address=self._address) from None
        if message is None:
            self._events.finish()
        else:
            self._events.feed(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """A blocking connection to a kvrelay cluster. Connects on first use; one channel, shared by all threads.

    `timeout_s` is the deadline of every call that does not name its own; None waits as long as the cluster does. A
    stream's deadline covers all of it. `api_key` tells a cluster that asks for one who is calling.
    """

    def __init__(
        self, address: str = DEFAULT_ADDRESS, *, timeout_s: float | None = None, api_key: str | None = None
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._metadata = credentials(api_key)
        self._channel = grpc.insecure_channel(address, options=channel_options())
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        label: str = "",
        timeout_s: float | None = None,
        terms: ServiceTerms | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """Return the complete answer to text, token ids or a conversation. Raises KvrelayError.

        `model` "" takes the served one; `label` appears in the cluster's logs; `terms` tell how soon it is needed.
        """
        with self.stream(prompt, model=model, label=label, timeout_s=timeout_s, terms=terms, **sampling) as stream:
            return stream.result()

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        label: str = "",
        timeout_s: float | None = None,
        terms: ServiceTerms | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationStream:
        """Send the request and return its events. Raises InvalidRequest for values that cannot be sent."""
        request = generate_request(prompt, sampling, model=model, label=label, terms=terms)
        call = self._stub.Generate(request, timeout=self._deadline_s(timeout_s), metadata=self._metadata)
        return GenerationStream(call, address=self.address)

    def chat(
        self,
        messages: str | Sequence[ChatTurn],
        *,
        model: str = "",
        label: str = "",
        timeout_s: float | None = None,
        terms: ServiceTerms | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """Return the assistant's complete answer to a conversation; a string is a single turn of the user."""
        return self.generate(
            as_conversation(messages), model=model, label=label, timeout_s=timeout_s, terms=terms, **sampling
        )

    def stream_chat(
        self,
        messages: str | Sequence[ChatTurn],
        *,
        model: str = "",
        label: str = "",
        timeout_s: float | None = None,
        terms: ServiceTerms | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationStream:
        """Return the events of the assistant's answer; a string is a single turn of the user."""
        return self.stream(
            as_conversation(messages), model=model, label=label, timeout_s=timeout_s, terms=terms, **sampling
        )

    def tokenize(self, source: str | Sequence[ChatTurn], *, timeout_s: float | None = None) -> Tokenization:
        """Return the tokens that `generate` would make of text or of a conversation."""
        return tokenization_from_proto(self._unary(self._stub.Tokenize, tokenize_request(source), timeout_s))

    def models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """Return the served models."""
        return models_from_proto(self._unary(self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout_s))

    def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Return what the router and every worker hold right now."""
        request = inference_pb2.GetClusterStatusRequest()
        return status_from_proto(self._unary(self._stub.GetClusterStatus, request, timeout_s))

    def explain(
        self, request_id: str | None = None, *, limit: int = 20, timeout_s: float | None = None
    ) -> tuple[Decision, ...]:
        """Return why a request went where it went, or the latest decisions; newest first, at most `limit`."""
        request = inference_pb2.ExplainRequest(request_id=request_id or "", limit=limit)
        return decisions_from_proto(self._unary(self._stub.Explain, request, timeout_s))

    def record(self, *, duration_s: float | None = None) -> TrafficStream:
        """Record what the caller's requests are like while they come: when, how long, which begin alike; no content.

        Those that come after the call are recorded; with `duration_s` those that come within it, and then the stream
        ends when the last of them has ended. It has no deadline.
        """
        request = inference_pb2.RecordTrafficRequest(duration_s=duration_s or 0.0)
        return TrafficStream(self._stub.RecordTraffic(request, metadata=self._metadata), address=self.address)

    def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        self._channel.close()

    def _unary(self, method: Callable[..., _T], request: Any, timeout_s: float | None) -> _T:
        try:
            return method(request, timeout=self._deadline_s(timeout_s), metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error, address=self.address) from None

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
