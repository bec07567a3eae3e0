"""A worker's services over one channel."""

from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc

from common.errors import from_rpc_error
from common.rpc import Connect, client_channel
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

_Response = TypeVar("_Response")


class Incoming(Generic[_Response]):
    """The messages of one running call. Leaving its `with` block, for whatever reason, cancels what is left of it."""

    def __init__(self, call: "grpc.aio.UnaryStreamCall[Any, _Response]") -> None:
        self._call = call
        self._messages = call.__aiter__()

    async def receive(self) -> _Response | None:
        """Return the next message, or None at a good end. Raises the KvrelayError that the peer reported."""
        try:
            return await anext(self._messages)
        except StopAsyncIteration:
            return None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def __enter__(self) -> "Incoming[_Response]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()


class WorkerClient:
    """Stubs of one worker process. Made once per address and reused; the channel connects again by itself."""

    def __init__(self, address: str, connect: Connect = client_channel) -> None:
        self._channel = connect(address)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self._decode = decode_pb2_grpc.DecodeServiceStub(self._channel)

    async def describe(self, *, timeout_s: float) -> worker_pb2.DescribeWorkerResponse:
        """Return the worker's facts. Raises KvrelayError."""
        try:
            return await self._worker.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def status(self, *, timeout_s: float) -> worker_pb2.WorkerStatus:
        """Return the worker's own report. Raises KvrelayError."""
        try:
            response = await self._worker.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return response.status

    def watch(self) -> Incoming[worker_pb2.WatchWorkerResponse]:
        """Subscribe to events and load; no deadline, because it lasts as long as the worker."""
        return Incoming(self._worker.WatchWorker(worker_pb2.WatchWorkerRequest()))

    def decode(self, request: decode_pb2.DecodeRequest, *, timeout_s: float) -> Incoming[decode_pb2.DecodeResponse]:
        """Start a Decode call."""
        return Incoming(self._decode.Decode(request, timeout=timeout_s))

    def prefill(
        self, request: prefill_pb2.PrefillRequest, *, timeout_s: float
    ) -> Incoming[prefill_pb2.PrefillResponse]:
        """Start a Prefill call."""
        return Incoming(self._prefill.Prefill(request, timeout=timeout_s))

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        await self._channel.close()
