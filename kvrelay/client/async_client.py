"""The asyncio client."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from common.rpc import client_channel
from kvrelay.client.base import DEFAULT_ADDRESS, BaseClient
from kvrelay.client.chat import ChatTurn
from kvrelay.client.collect import AsyncGenerationStream
from kvrelay.client.convert import error_from_rpc, record
from kvrelay.client.direct import DirectCall
from kvrelay.client.events import SampleSoFar
from kvrelay.client.explanations import Decision, Diagnosis
from kvrelay.client.failover import Attempts, ping_timeout_ms
from kvrelay.client.requests import EmbedOptions, GenerateOptions, Prompt, embed_request, tokenize_request
from kvrelay.client.results import Embedding, Generation, ModelInfo, Tokenization
from kvrelay.client.status import ClusterStatus, Forgotten
from kvrelay.client.streams import unless_closed
from kvrelay.client.tls import Tls, channel_credentials
from kvrelay.client.traffic import AsyncTrafficStream
from kvrelay.v1 import decode_pb2_grpc, inference_pb2, inference_pb2_grpc

_T = TypeVar("_T")


class AsyncClient(BaseClient[AsyncGenerationStream, AsyncTrafficStream, Coroutine[Any, Any, Generation]]):
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
        streams = AsyncGenerationStream, AsyncTrafficStream
        super().__init__(addresses, streams, timeout_s=timeout_s, api_key=api_key, max_attempts=max_attempts)
        self._tls = channel_credentials(tls)
        self._is_direct = direct
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        """Channels to routers and, in direct mode, workers, by address and, if it differs, name in the certificate."""

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Return the complete answer to text, token ids or a conversation. Raises KvrelayError."""
        async with self.stream(prompt, **options) as stream:
            return await stream.result()

    async def embed(self, prompt: str | Sequence[int], **options: Unpack[EmbedOptions]) -> Embedding:
        """Return the embedding of text or token ids. Raises KvrelayError."""
        request = embed_request(prompt, options)
        response = await self._unary(lambda stub: stub.Embed, request, options.get("timeout_s"))
        return record(Embedding, response)

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

    async def diagnose(
        self, *, window_s: float = 0.0, request_id: str | None = None, timeout_s: float | None = None
    ) -> Diagnosis:
        """Return what costs the answers of the last `window_s` time, by default 300; or that of one request."""
        request = inference_pb2.DiagnoseRequest(window_s=window_s, request_id=request_id or "")
        return record(Diagnosis, await self._unary(lambda stub: stub.Diagnose, request, timeout_s))

    async def forget(self, tenant: str, *, cache_salt: str = "", timeout_s: float | None = None) -> Forgotten:
        """Drop a tenant's cached blocks from every worker, of its requests with this salt; for operators.

        What could not be forgotten is in the result.
        """
        request = inference_pb2.ForgetTenantRequest(tenant=tenant, cache_salt=cache_salt)
        return record(Forgotten, await self._unary(lambda stub: stub.ForgetTenant, request, timeout_s))

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
        metadata = self._call_metadata()
        while True:
            address = self.address
            try:
                call = method(self._stub(address))(request, timeout=time_left(), metadata=metadata)
                return await unless_closed(call)
            except grpc.RpcError as error:
                failure = error_from_rpc(error, address=address)
            await asyncio.sleep(attempts.failed(failure, address=address))

    def _reading(self, call: Any, request: inference_pb2.GenerateRequest, so_far: Sequence[SampleSoFar]) -> Any:
        if not request.direct:
            return call
        num_samples = request.sampling.n if request.sampling.HasField("n") else 1
        return DirectCall(call, self._worker, num_samples=num_samples, so_far=so_far)

    def _stub(self, address: str) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        return inference_pb2_grpc.InferenceServiceStub(self._channel(address))

    def _worker(self, grant: inference_pb2.DirectGrant) -> "decode_pb2_grpc.DirectServiceAsyncStub":
        """Return the stub of a decode worker that tokens are streamed from."""
        return decode_pb2_grpc.DirectServiceStub(self._channel(grant.address, grant.server_name))

    def _channel(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        key = (address, server_name)
        if key not in self._channels:  # not in __init__: a channel belongs to the loop that runs when it is made
            self._channels[key] = client_channel(
                address, self._tls, server_name=server_name, ping_timeout_ms=ping_timeout_ms(self.addresses)
            )
        return self._channels[key]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
