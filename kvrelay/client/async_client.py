"""The asyncio client."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from common.rpc import client_channel
from kvrelay.client.base import DEFAULT_ADDRESS, BaseClient, GenerateOptions
from kvrelay.client.collect import AsyncGenerationStream, EventBuffer
from kvrelay.client.convert import error_from_rpc, record
from kvrelay.client.direct import DirectCall
from kvrelay.client.failover import Attempts
from kvrelay.client.records import ChatTurn, Generation, ModelInfo, Prompt, SampleSoFar, Tokenization
from kvrelay.client.requests import as_conversation, tokenize_request
from kvrelay.client.status import ClusterStatus, Decision
from kvrelay.client.streams import unless_closed
from kvrelay.client.tls import Tls, channel_credentials
from kvrelay.client.traffic import AsyncTrafficStream, TrafficBuffer
from kvrelay.v1 import decode_pb2_grpc, inference_pb2, inference_pb2_grpc

_T = TypeVar("_T")


class AsyncClient(BaseClient):
    """A connection to a kvrelay cluster. Connects on first use; from then on it belongs to that event loop.

    Takes the arguments of `Client`. `direct` streams tokens straight from the decode workers, which must be reachable
    from here; nothing else changes. Raises InvalidRequest.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
        direct: bool = False,
        max_attempts: int | None = None,
        tls: Tls = None,
    ) -> None:
        super().__init__(addresses, timeout_s=timeout_s, api_key=api_key, max_attempts=max_attempts)
        self._tls = channel_credentials(tls)
        self._is_direct = direct
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        """To routers and, in direct mode, workers: by address and by the name in the certificate, if not that."""

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Return the complete answer to text, token ids or a conversation. Raises KvrelayError."""
        async with self.stream(prompt, **options) as stream:
            return await stream.result()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """Send the request and return its events. Raises InvalidRequest for values that cannot be sent."""
        request, time_left = self._request(prompt, options)
        request.direct = self._is_direct
        num_samples = request.sampling.n if request.sampling.HasField("n") else 1

        def send(address: str, request: inference_pb2.GenerateRequest, so_far: Sequence[SampleSoFar]) -> Any:
            call = self._stub(address).Generate(request, timeout=time_left(), metadata=self._metadata)
            return DirectCall(call, self._worker, num_samples=num_samples, so_far=so_far) if request.direct else call

        return AsyncGenerationStream(send, request, self._routers, EventBuffer())

    async def chat(self, messages: str | Sequence[ChatTurn], **options: Unpack[GenerateOptions]) -> Generation:
        """Return the assistant's complete answer to a conversation; a string is a single turn of the user."""
        return await self.generate(as_conversation(messages), **options)

    def stream_chat(
        self, messages: str | Sequence[ChatTurn], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerationStream:
        """Return the events of the assistant's answer; a string is a single turn of the user."""
        return self.stream(as_conversation(messages), **options)

    async def tokenize(self, source: str | Sequence[ChatTurn], *, timeout_s: float | None = None) -> Tokenization:
        """Return the tokens that `generate` would make of text or of a conversation."""
        request = tokenize_request(source)
        return record(Tokenization, await self._unary(lambda stub: stub.Tokenize, request, timeout_s))

    async def models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """Return the served models."""
        request = inference_pb2.ListModelsRequest()
        response = await self._unary(lambda stub: stub.ListModels, request, timeout_s)
        return tuple(record(ModelInfo, model) for model in response.models)

    async def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Return what the router and every worker hold right now."""
        request = inference_pb2.GetClusterStatusRequest()
        return record(ClusterStatus, await self._unary(lambda stub: stub.GetClusterStatus, request, timeout_s))

    async def explain(
        self, request_id: str | None = None, *, limit: int = 20, timeout_s: float | None = None
    ) -> tuple[Decision, ...]:
        """Return the decisions on a request, or the latest ones; newest first, at most `limit`."""
        request = inference_pb2.ExplainRequest(request_id=request_id or "", limit=limit)
        response = await self._unary(lambda stub: stub.Explain, request, timeout_s)
        return tuple(record(Decision, decision) for decision in response.decisions)

    def record(self, *, duration_s: float | None = None) -> AsyncTrafficStream:
        """Record the caller's requests as they come, like `Client.record`."""

        def send(address: str, request: inference_pb2.RecordTrafficRequest, _: Sequence[SampleSoFar]) -> Any:
            return self._stub(address).RecordTraffic(request, metadata=self._metadata)

        request = inference_pb2.RecordTrafficRequest(duration_s=duration_s or 0.0)
        return AsyncTrafficStream(send, request, self._same_router(), TrafficBuffer())

    async def aclose(self) -> None:
        """Close the channels; running calls are cancelled."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _unary(
        self,
        method: "Callable[[inference_pb2_grpc.InferenceServiceAsyncStub], Callable[..., Awaitable[_T]]]",
        request: Any,
        timeout_s: float | None,
    ) -> _T:
        attempts, time_left = Attempts(self._routers), self._time_left(timeout_s)
        while True:
            address = self.address
            try:
                call = method(self._stub(address))(request, timeout=time_left(), metadata=self._metadata)
                return await unless_closed(call)
            except grpc.RpcError as error:
                failure = error_from_rpc(error, address=address)
            await asyncio.sleep(attempts.failed(failure, address=address))

    def _stub(self, address: str) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        return inference_pb2_grpc.InferenceServiceStub(self._channel(address))

    def _worker(self, grant: inference_pb2.DirectGrant) -> "decode_pb2_grpc.DirectServiceAsyncStub":
        """Return the stub of a decode worker that tokens are streamed from."""
        return decode_pb2_grpc.DirectServiceStub(self._channel(grant.address, grant.server_name))

    def _channel(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        key = (address, server_name)
        if key not in self._channels:  # not in __init__: a channel belongs to the loop that runs when it is made
            self._channels[key] = client_channel(address, self._tls, server_name=server_name)
        return self._channels[key]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
