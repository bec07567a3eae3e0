"""The blocking client, on gRPC's own blocking channel: no event loop, safe to share between threads."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from common.rpc import door_options
from kvrelay.client.base import DEFAULT_ADDRESS, BaseClient
from kvrelay.client.chat import ChatTurn
from kvrelay.client.collect import GenerationStream
from kvrelay.client.convert import error_from_rpc, record
from kvrelay.client.explanations import Decision, Diagnosis
from kvrelay.client.failover import Attempts, ping_timeout_ms
from kvrelay.client.requests import EmbedOptions, GenerateOptions, Prompt, embed_request, tokenize_request
from kvrelay.client.results import Embedding, Generation, ModelInfo, Tokenization
from kvrelay.client.status import ClusterStatus, Forgotten
from kvrelay.client.tls import Tls, channel_credentials
from kvrelay.client.traffic import TrafficStream
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

_T = TypeVar("_T")


class Client(BaseClient[GenerationStream, TrafficStream, Generation]):
    """A blocking connection to a kvrelay cluster. Connects on first use; its channels are shared by all threads.

    `addresses` are those of the routers, as a list or with commas: while one cannot be reached the next one is called,
    and an answer that had begun goes on there. `max_attempts` bounds the calls that may fail in a row; by default
    several routers are called six times each within seconds, and a single one once, or nine times when it had begun to
    answer. `timeout_s` is the deadline of every call that does not name its own; None waits as long as the cluster
    does. A stream's deadline covers all of it. `api_key` names the caller to a cluster that asks for it. `tls` chooses
    the connection (kvrelay/client/tls.py); None leaves the choice to the environment. Raises InvalidRequest.
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
        streams = GenerationStream, TrafficStream
        super().__init__(addresses, streams, timeout_s=timeout_s, api_key=api_key, max_attempts=max_attempts)
        self._channels = _channels(self.addresses, channel_credentials(tls))

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Return the complete answer to text, token ids or a conversation. Raises KvrelayError."""
        with self.stream(prompt, **options) as stream:
            return stream.result()

    def embed(self, prompt: str | Sequence[int], **options: Unpack[EmbedOptions]) -> Embedding:
        """Return the embedding of text or token ids. Raises KvrelayError."""
        request = embed_request(prompt, options)
        return record(Embedding, self._unary(lambda stub: stub.Embed, request, options.get("timeout_s")))

    def tokenize(self, source: str | Sequence[ChatTurn], *, timeout_s: float | None = None) -> Tokenization:
        """Return the tokens that `generate` would make of text or of a conversation."""
        return record(Tokenization, self._unary(lambda stub: stub.Tokenize, tokenize_request(source), timeout_s))

    def models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """Return the served models."""
        request = inference_pb2.ListModelsRequest()
        response = self._unary(lambda stub: stub.ListModels, request, timeout_s)
        return tuple(record(ModelInfo, model) for model in response.models)

    def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Return what the router and every worker hold right now."""
        request = inference_pb2.GetClusterStatusRequest()
        return record(ClusterStatus, self._unary(lambda stub: stub.GetClusterStatus, request, timeout_s))

    def explain(
        self, request_id: str | None = None, *, limit: int = 20, timeout_s: float | None = None
    ) -> tuple[Decision, ...]:
        """Return the decisions on a request, or the latest ones; newest first, at most `limit`."""
        request = inference_pb2.ExplainRequest(request_id=request_id or "", limit=limit)
        response = self._unary(lambda stub: stub.Explain, request, timeout_s)
        return tuple(record(Decision, decision) for decision in response.decisions)

    def diagnose(
        self, *, window_s: float = 0.0, request_id: str | None = None, timeout_s: float | None = None
    ) -> Diagnosis:
        """Return what costs the answers of the last `window_s` time, by default 300; or that of one request."""
        request = inference_pb2.DiagnoseRequest(window_s=window_s, request_id=request_id or "")
        return record(Diagnosis, self._unary(lambda stub: stub.Diagnose, request, timeout_s))

    def forget(self, tenant: str, *, cache_salt: str = "", timeout_s: float | None = None) -> Forgotten:
        """Drop a tenant's cached blocks from every worker, of its requests with this salt; for operators.

        What could not be forgotten is in the result.
        """
        request = inference_pb2.ForgetTenantRequest(tenant=tenant, cache_salt=cache_salt)
        return record(Forgotten, self._unary(lambda stub: stub.ForgetTenant, request, timeout_s))

    def close(self) -> None:
        """Close the channels; running calls are cancelled."""
        self._routers.close()
        for channel in self._channels.values():
            channel.close()

    def _unary(
        self,
        method: Callable[[inference_pb2_grpc.InferenceServiceStub], Callable[..., _T]],
        request: Any,
        timeout_s: float | None,
    ) -> _T:
        attempts, time_left = Attempts(self._routers), self._time_left(timeout_s)
        metadata = self._call_metadata()
        while True:
            address = self.address
            try:
                return method(self._stub(address))(request, timeout=time_left(), metadata=metadata)
            except grpc.RpcError as error:
                failure = error_from_rpc(error, address=address)
            time.sleep(attempts.failed(failure, address=address))

    def _stub(self, address: str) -> inference_pb2_grpc.InferenceServiceStub:
        return inference_pb2_grpc.InferenceServiceStub(self._channels[address])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _channels(addresses: Sequence[str], tls: grpc.ChannelCredentials | None) -> dict[str, grpc.Channel]:
    return {address: _channel(address, tls, ping_timeout_ms=ping_timeout_ms(addresses)) for address in addresses}


def _channel(address: str, tls: grpc.ChannelCredentials | None, *, ping_timeout_ms: int) -> grpc.Channel:
    options = door_options(address, ping_timeout_ms=ping_timeout_ms)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls, options=options)
