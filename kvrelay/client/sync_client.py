"""The blocking client, on gRPC's own blocking channel: no event loop, safe to share between threads."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from common.errors import KvrelayError
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
from kvrelay.client.failover import Attempts, RouterList, countdown
from kvrelay.client.records import ChatTurn, Event, Generation, ModelInfo, Prompt, ServiceTerms, Tokenization
from kvrelay.client.requests import SamplingOptions, as_conversation, credentials, generate_request, tokenize_request
from kvrelay.client.status import ClusterStatus
from kvrelay.client.tls import Tls, channel_credentials
from kvrelay.client.traffic import TrafficStream
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
_T = TypeVar("_T")


class GenerationStream(Iterator[Event]):
    """The events of one request, as they arrive. Iterate in one thread; `close` from any.

    Closing it, leaving its `with` block or dropping the last reference (as `break` does in
    `for event in client.stream(…)`) cancels the request at once: the cluster stops computing it.
    """

    def __init__(
        self,
        send: Callable[[str, inference_pb2.GenerateRequest], Any],
        request: inference_pb2.GenerateRequest,
        routers: RouterList,
    ) -> None:
        """`send` starts a call at a router: an iterator with cancel(), of a type that grpc keeps private."""
        self._send = send
        self._request = request
        self._attempts = Attempts(routers)
        self._events = EventBuffer()
        self._closed = threading.Event()
        self._start()

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
        self._closed.set()
        if not self._events.has_ended:
            self._events.drop()
            self._call.cancel()

    def _start(self) -> None:
        self._address = self._attempts.routers.current
        self._call = self._send(self._address, self._events.resumed(self._request))
        if self._closed.is_set():  # by another thread, which may not have seen this call
            self._call.cancel()

    def _read(self) -> None:
        try:
            message = next(self._call, None)
        except grpc.RpcError as error:
            if self._events.has_ended:  # closed by another thread while this one was reading
                return
            self._go_on(error_from_rpc(error, address=self._address))
            return
        if message is None:
            self._events.finish()
            return
        self._events.feed(message)
        if message.HasField("tokens"):
            self._attempts.succeeded()

    def _go_on(self, error: KvrelayError) -> None:
        """Start again at another router. Raises the error when that cannot help."""
        pause_s = self._attempts.failed(error, address=self._address)
        if not self._closed.wait(pause_s):
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """A blocking connection to a kvrelay cluster. Connects on first use; its channels are shared by all threads.

    `addresses` are those of the routers, as a list or with commas: while one cannot be reached the next one is called,
    and an answer that had begun goes on there. `max_attempts` bounds the calls that may fail in a row; by default one
    router is called once, several are called six times each within seconds. `timeout_s` is the deadline of every call
    that does not name its own; None waits as long as the cluster does. A stream's deadline covers all of it. `api_key`
    tells a cluster that asks for one who is calling. `tls` says how to connect (kvrelay/client/tls.py); None: as the
    environment says. Raises InvalidRequest.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
        max_attempts: int | None = None,
        tls: Tls = None,
    ) -> None:
        self._routers = RouterList(addresses, max_attempts=max_attempts)
        self._timeout_s = timeout_s
        self._metadata = credentials(api_key)
        self._channels = {address: _channel(address, channel_credentials(tls)) for address in self.addresses}

    @property
    def addresses(self) -> tuple[str, ...]:
        """All routers that it knows."""
        return self._routers.addresses

    @property
    def address(self) -> str:
        """The router that calls go to."""
        return self._routers.current

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
        time_left = countdown(self._deadline_s(timeout_s))

        def send(address: str, request: inference_pb2.GenerateRequest) -> Any:
            return self._stub(address).Generate(request, timeout=time_left(), metadata=self._metadata)

        return GenerationStream(send, request, self._routers)

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
        return tokenization_from_proto(self._unary(lambda stub: stub.Tokenize, tokenize_request(source), timeout_s))

    def models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """Return the served models."""
        request = inference_pb2.ListModelsRequest()
        return models_from_proto(self._unary(lambda stub: stub.ListModels, request, timeout_s))

    def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Return what the router and every worker hold right now."""
        request = inference_pb2.GetClusterStatusRequest()
        return status_from_proto(self._unary(lambda stub: stub.GetClusterStatus, request, timeout_s))

    def explain(
        self, request_id: str | None = None, *, limit: int = 20, timeout_s: float | None = None
    ) -> tuple[Decision, ...]:
        """Return why a request went where it went, or the latest decisions; newest first, at most `limit`."""
        request = inference_pb2.ExplainRequest(request_id=request_id or "", limit=limit)
        return decisions_from_proto(self._unary(lambda stub: stub.Explain, request, timeout_s))

    def record(self, *, duration_s: float | None = None) -> TrafficStream:
        """Record what the caller's requests are like while they come: when, how long, which begin alike; no content.

        Those that come after the call are recorded; with `duration_s` those that come within it, and then the stream
        ends when the last of them has ended. It has no deadline.
        """
        request = inference_pb2.RecordTrafficRequest(duration_s=duration_s or 0.0)
        address = self.address
        return TrafficStream(self._stub(address).RecordTraffic(request, metadata=self._metadata), address=address)

    def close(self) -> None:
        """Close the channels; running calls are cancelled."""
        for channel in self._channels.values():
            channel.close()

    def _unary(
        self,
        method: Callable[[inference_pb2_grpc.InferenceServiceStub], Callable[..., _T]],
        request: Any,
        timeout_s: float | None,
    ) -> _T:
        attempts, time_left = Attempts(self._routers), countdown(self._deadline_s(timeout_s))
        while True:
            address = self.address
            try:
                return method(self._stub(address))(request, timeout=time_left(), metadata=self._metadata)
            except grpc.RpcError as error:
                failure = error_from_rpc(error, address=address)
            time.sleep(attempts.failed(failure, address=address))

    def _stub(self, address: str) -> inference_pb2_grpc.InferenceServiceStub:
        return inference_pb2_grpc.InferenceServiceStub(self._channels[address])

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _channel(address: str, tls: grpc.ChannelCredentials | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=channel_options())
    return grpc.secure_channel(address, tls, options=channel_options())
