"""What the blocking and the asyncio client share: arguments, requests, and the state of a stream."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from common.errors import Cancelled
from common.rpc import is_cancelled
from common.sampling import SamplingOptions
from kvrelay.client.collect import EventBuffer
from kvrelay.client.convert import error_from_rpc
from kvrelay.client.failover import Attempts, RouterList, countdown
from kvrelay.client.records import Prompt, SampleSoFar, ServiceTerms
from kvrelay.client.requests import credentials, generate_request
from kvrelay.v1 import inference_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"
_T = TypeVar("_T")

Send = Callable[[str, inference_pb2.GenerateRequest, Sequence[SampleSoFar]], Any]
"""Starts a call at the router of an address and returns it; a resumed request comes with what has arrived."""
TimeLeft = Callable[[], float | None]


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of the generating calls: those of sampling, and four of the request."""

    model: str
    """Name of a served model; default: the only one."""
    label: str
    """Appears in the cluster's logs."""
    timeout_s: float | None
    """Deadline of the whole call; default: the client's."""
    terms: ServiceTerms | None
    """How soon the answer is needed."""


class BaseClient:
    """The routers, the deadline and the API key of a client."""

    def __init__(
        self, addresses: str | Sequence[str], *, timeout_s: float | None, api_key: str | None, max_attempts: int | None
    ) -> None:
        self._routers = RouterList(addresses, max_attempts=max_attempts)
        self._timeout_s = timeout_s
        self._metadata = credentials(api_key)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All routers that the client knows."""
        return self._routers.addresses

    @property
    def address(self) -> str:
        """The router that calls go to."""
        return self._routers.current

    def _time_left(self, timeout_s: float | None) -> TimeLeft:
        """Start the deadline of a call."""
        return countdown(self._timeout_s if timeout_s is None else timeout_s)

    def _request(self, prompt: Prompt, options: GenerateOptions) -> tuple[inference_pb2.GenerateRequest, TimeLeft]:
        """Return the message and its deadline. Raises InvalidRequest for values that cannot be sent, TypeError."""
        sampling: Any = dict(options)
        timeout_s, terms = sampling.pop("timeout_s", None), sampling.pop("terms", None)
        model, label = sampling.pop("model", ""), sampling.pop("label", "")
        return generate_request(prompt, sampling, model=model, label=label, terms=terms), self._time_left(timeout_s)


class BaseStream:
    """One request: its current call, its attempts, and the events that have arrived."""

    def __init__(self, send: Send, request: inference_pb2.GenerateRequest, routers: RouterList) -> None:
        self._send = send
        self._request = request
        self._attempts = Attempts(routers)
        self._events = EventBuffer()
        self._start()

    def _start(self) -> None:
        """Call the current router for what is still missing."""
        self._address = self._attempts.routers.current
        self._call = self._send(self._address, self._events.resumed(self._request), self._events.so_far())

    def _receive(self, message: inference_pb2.GenerateResponse | None) -> None:
        """Take the next message, None at the regular end. Raises EngineFault."""
        if message is None:
            self._events.finish()
            return
        self._events.feed(message)
        if message.HasField("tokens"):
            self._attempts.succeeded()

    def _failed(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next attempt. Raises KvrelayError when another one cannot help."""
        return self._attempts.failed(error_from_rpc(error, address=self._address), address=self._address)

    def _cancel(self) -> None:
        """Cancel the request unless it has ended."""
        if not self._events.has_ended:
            self._events.drop()
            self._call.cancel()


async def unless_closed(reply: Awaitable[_T]) -> _T:
    """Return what a call brings. Raises Cancelled when another task has closed the call.

    grpc reports that as if the task that waits were cancelled.
    """
    try:
        return await reply
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise Cancelled("the client was closed during the call") from None
