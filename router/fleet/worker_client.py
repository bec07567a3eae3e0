"""A worker's services over one channel."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import grpc

from common.block_hash import BlockHashes
from common.errors import KvrelayError, WorkerLost, from_rpc_error
from common.ids import Epoch, HashRoot
from common.rpc import Connect, is_cancelled
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    prefix_pb2,
    prefix_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from router.fleet.decode_stream import DecodeStream
from router.fleet.return_notes import ReturnNotes

_HINT_TIMEOUT_S = 5.0

_Response = TypeVar("_Response")
_Received = TypeVar("_Received", covariant=True)


class Incoming(Protocol[_Received]):
    """The messages of one running call. Leaving its `with` block cancels the call if it still runs."""

    async def receive(self) -> _Received | None:
        """Return the next message, or None at a good end. Raises the KvrelayError that the peer reported."""
        ...

    async def follow(self, handle: Callable[[_Received], bool]) -> None:
        """Hand over every further message until `handle` returns True or the call ends well. Raises like `receive`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_error: object) -> None: ...


class OwnStream(Generic[_Response]):
    """A call on its own stream."""

    def __init__(self, call: "grpc.aio.UnaryStreamCall[Any, _Response]") -> None:
        self._call = call
        self._messages = call.__aiter__()
        self._broken: KvrelayError | None = None

    async def receive(self) -> _Response | None:
        """Return the next message as `Incoming.receive` does."""
        try:
            return await anext(self._messages)
        except StopAsyncIteration:
            return None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise self._broken or _left() from None

    def break_off(self, error: KvrelayError) -> None:
        """Cancel the call; its reader gets `error`."""
        self._broken = error
        self._call.cancel()

    async def follow(self, handle: Callable[[_Response], bool]) -> None:
        """Hand over further messages as `Incoming.follow` does."""
        while (message := await self.receive()) is not None:
            if handle(message):
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._call.cancel()


async def _answer(call: "grpc.aio.UnaryUnaryCall[Any, _Response]") -> _Response:
    """Return the response of a call. Raises KvrelayError; WorkerLost when the channel is closed in the meantime."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise _left() from None


def _left() -> WorkerLost:
    """Return the error of a call whose channel is closed in the meantime."""
    return WorkerLost("the worker has left the membership")


class WorkerClient:
    """Stubs of one worker process. Made once per address and reused; the channel connects again by itself."""

    def __init__(self, address: str, connect: Connect) -> None:
        self._channel = connect(address)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self._prefix = prefix_pb2_grpc.PrefixServiceStub(self._channel)
        self._decode = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self._shared: DecodeStream | None = None
        self.returns = ReturnNotes(self._expect_returns)
        """Hints about the returns of sessions."""
        self._prefilling: WeakKeyDictionary[OwnStream[prefill_pb2.PrefillResponse], None] = WeakKeyDictionary()
        self._awaited: dict[asyncio.Future[KvrelayError], None] = {}

    async def describe(self, *, timeout_s: float) -> worker_pb2.DescribeWorkerResponse:
        """Return the worker's facts. Raises KvrelayError."""
        return await _answer(self._worker.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=timeout_s))

    async def status(self, *, timeout_s: float) -> worker_pb2.WorkerStatus:
        """Return the worker's own report. Raises KvrelayError."""
        request = worker_pb2.GetWorkerStatusRequest()
        return (await _answer(self._worker.GetWorkerStatus(request, timeout=timeout_s))).status

    async def forget(self, root: HashRoot, *, timeout_s: float) -> worker_pb2.ForgetBlocksResponse:
        """Let the worker drop the blocks of a root. Raises KvrelayError."""
        request = worker_pb2.ForgetBlocksRequest(hash_root=root)
        return await _answer(self._worker.ForgetBlocks(request, timeout=timeout_s))

    async def read_ahead(
        self, hashes: BlockHashes, root: HashRoot, epoch: Epoch, *, time_limit_s: float, timeout_s: float
    ) -> int:
        """Let the worker read blocks from its tiers into pages; returns how many came. Raises KvrelayError."""
        request = prefix_pb2.ReadAheadRequest(
            hash_root=root, block_hashes=hashes.packed, epoch=epoch, time_limit_s=time_limit_s
        )
        return (await _answer(self._prefix.ReadAhead(request, timeout=timeout_s))).num_read_blocks

    async def _expect_returns(self, request: worker_pb2.ExpectReturnsRequest) -> None:
        await _answer(self._worker.ExpectReturns(request, timeout=_HINT_TIMEOUT_S))

    def watch(self, *, heartbeat_s: float = 0.0) -> Incoming[worker_pb2.WatchWorkerResponse]:
        """Subscribe to events and load, without a deadline: the call lasts as long as the worker.

        An update comes at least every `heartbeat_s`; with 0, only when something changes.
        """
        return OwnStream(self._worker.WatchWorker(worker_pb2.WatchWorkerRequest(heartbeat_s=heartbeat_s)))

    def decode(self, request: decode_pb2.DecodeRequest) -> Incoming[decode_pb2.DecodeResponse]:
        """Start decoding; the caller closes the call itself when its time is up."""
        if self._shared is None or self._shared.is_over:
            self._shared = DecodeStream(self._decode.DecodeMany())
        return self._shared.open(request)

    def prefill(
        self, request: prefill_pb2.PrefillRequest, *, timeout_s: float
    ) -> Incoming[prefill_pb2.PrefillResponse]:
        """Start a Prefill call."""
        call = OwnStream(self._prefill.Prefill(request, timeout=timeout_s))
        self._prefilling[call] = None
        return call

    @contextmanager
    def loss(self) -> Iterator["asyncio.Future[KvrelayError]"]:
        """Yield a future of the error that breaks off this worker's calls; for code that has no call open there."""
        future: asyncio.Future[KvrelayError] = asyncio.get_running_loop().create_future()
        self._awaited[future] = None
        try:
            yield future
        finally:
            self._awaited.pop(future, None)
            future.cancel()

    def break_off(self, error: KvrelayError) -> None:
        """Fail all calls that compute or decode with `error`. The worker cancels them when it learns of it."""
        for future in self._awaited:
            if not future.done():
                future.set_result(error)
        if self._shared is not None:
            self._shared.break_off(error)
        for call in list(self._prefilling):
            call.break_off(error)

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        await self.returns.aclose()
        if self._shared is not None:
            await self._shared.aclose()
        await self._channel.close()
