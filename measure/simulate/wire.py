"""Carries messages between the hosts of a simulated network, in virtual time.

Each message takes a latency; those of one direction of a call arrive in order. KV payload occupies the link of the
worker that sends it and that of the worker that receives it; transfers that share a link queue there.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc

from kvrelay.v1 import kv_transfer_pb2
from measure.simulate.faults import Direction, NetworkCuts, SeededFaults, Transmission
from measure.simulate.loop import VirtualLoop
from measure.simulate.records import NetworkShape

EOF = grpc.aio.EOF
KEEPALIVE_S = 5.0
"""Time after which a broken connection is noticed: ping interval and timeout of `common.rpc`."""
_KV_METHOD = "/kvrelay.v1.KvTransferService/FetchBlocks"


@dataclass(frozen=True, slots=True)
class Status:
    """The end of a call."""

    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class HalfClose:
    """The client has written its last message."""


OK = Status(grpc.StatusCode.OK)
CANCELLED = Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
HANDLER_CANCELLED = Status(grpc.StatusCode.CANCELLED, "the handler was cancelled")
TOO_LATE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """Hosts, method and deadline of a call."""

    source: str
    target: str
    method: str
    deadline_s: float | None
    metadata: tuple[tuple[str, Any], ...] = ()


class Inbox:
    """Messages that have arrived. One reader at a time."""

    __slots__ = ("_loop", "_messages", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: object) -> None:
        """Append a message that has arrived."""
        self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __len__(self) -> int:
        return len(self._messages)

    def clear(self) -> None:
        """Drop all unread messages."""
        self._messages.clear()

    def pop(self) -> Any:
        """Return the oldest message."""
        return self._messages.popleft()

    async def wait(self) -> None:
        """Wait for the next `wake`."""
        self._waiter = self._loop.create_future()
        await self._waiter


class Carried(Protocol):
    """A call as the wire knows it. Hashed by identity."""

    @property
    def terms(self) -> CallTerms:
        """Hosts and method of the call."""

    @property
    def served_by(self) -> object | None:
        """The server's end of the call; None before the call has arrived there."""

    def in_order(self, arrives_s: float, *, is_request: bool) -> float:
        """Return the earliest time of arrival behind all earlier messages of the direction."""

    def break_off(self, address: str) -> None:
        """End the call on both sides: the connection to a host is lost."""

    def lose_client(self, address: str) -> None:
        """End the client's side alone."""

    def lose_server(self) -> None:
        """End the server's side alone."""


@dataclass(slots=True)
class _Link:
    """Times at which a host's two directions are free again."""

    out_free_s: float = 0.0
    in_free_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBytes:
    """Bytes of the pages that travel; from `num_blocks` on they are window pages (`engine.kv_store.KvStore`)."""

    block: int
    window: int = 0
    num_blocks: int = 0

    def total(self, page_ids: Sequence[int]) -> int:
        """Return the bytes of pages of one kind."""
        is_window = self.window and page_ids and page_ids[0] >= self.num_blocks
        return len(page_ids) * (self.window if is_window else self.block)


class Wire:
    """Links of all hosts and the calls that are open on them. Event loop only."""

    def __init__(
        self,
        loop: VirtualLoop,
        shape: NetworkShape,
        *,
        pages: PageBytes,
        extra_latency_s: Mapping[str, float] | None = None,
        faults: SeededFaults | None = None,
    ) -> None:
        """`extra_latency_s`: by full method name, for the messages that the server sends."""
        self.loop = loop
        self.faults = faults
        self.latency_s = shape.latency_s
        self._kv_bytes_per_s = shape.kv_bytes_per_s
        self._pages = pages
        self._extra_latency_s = dict(extra_latency_s or {})
        self.context = copy_context()
        """Context of deliveries: what has been sent arrives even if the sender is stopped."""
        self.cuts = NetworkCuts(loop, self.context)
        self._links: dict[str, _Link] = {}
        self._calls: dict[Carried, None] = {}

    @property
    def num_calls(self) -> int:
        """Calls that at least one side holds open."""
        return len(self._calls)

    def forget(self, call: Carried) -> None:
        """Drop a call that is over on both sides."""
        self._calls.pop(call, None)

    def send(self, call: Carried, message: Any, *, is_request: bool, deliver: Callable[[Any], None]) -> float:
        """Deliver a message of a call in order; returns the time at which it has left the sender."""
        terms = call.terms
        is_kv = terms.method == _KV_METHOD and isinstance(message, kv_transfer_pb2.FetchBlocksResponse)
        now_s = left_s = self.loop.time()
        source, target = (terms.source, terms.target) if is_request else (terms.target, terms.source)
        arrives_s = now_s + self.latency_s
        if not is_request:
            if is_kv and (num_bytes := self._payload_bytes(message)):
                left_s = self._transfer(source, target, num_bytes)
                arrives_s = left_s + self.latency_s
            arrives_s += self._extra_latency_s.get(terms.method, 0.0)
        copies = 1
        if self.faults is not None:
            if is_kv and message.HasField("chunk"):
                message = self.faults.damaged(message)
            transmission, late_s = self.faults.transmission(source, target)
            arrives_s += late_s
            if transmission is Transmission.LOST:
                self.break_off_later(call, source)
                return left_s
            if transmission is Transmission.DUPLICATED and not isinstance(message, Status):
                copies = 2
        arrives_s = call.in_order(arrives_s, is_request=is_request)
        for _ in range(copies):
            self.arrive_at(arrives_s, (source, target), deliver, message)
        return left_s

    def arrive_at(
        self, arrives_s: float, direction: Direction, deliver: Callable[..., object], *arguments: Any
    ) -> None:
        """Call `deliver` at a time, or when a cut of the direction is healed."""
        if self.faults is None:
            self.loop.call_at(arrives_s, deliver, *arguments, context=self.context)
        else:
            self.loop.call_at(arrives_s, self.cuts.arrive, direction, deliver, *arguments, context=self.context)

    def part(self, call: Carried, address: str, *, is_dead: bool) -> None:
        """End a call whose connection to a host is lost: at once there if the host is dead, elsewhere when noticed."""
        terms, loop = call.terms, self.loop
        if self.faults is None or not self.faults.hear_apart:
            call.break_off(address)
            return
        for host, lose in ((terms.source, partial(call.lose_client, address)), (terms.target, call.lose_server)):
            if is_dead and host == address:
                lose()
            else:
                loop.call_later(self.faults.notice_s(), lose, context=self.context)

    def break_off_later(self, call: Carried, address: str) -> None:
        """End a call on both sides when the loss of its connection to a host is noticed."""
        self.loop.call_later(KEEPALIVE_S, call.break_off, address, context=self.context)

    def _transfer(self, source: str, target: str, num_bytes: int) -> float:
        """Book both links; returns the time at which the last byte has passed them."""
        seconds = num_bytes / self._kv_bytes_per_s
        sender, receiver = (self._links.setdefault(host, _Link()) for host in (source, target))
        sender.out_free_s = max(self.loop.time(), sender.out_free_s) + seconds
        receiver.in_free_s = max(sender.out_free_s, receiver.in_free_s + seconds)
        return receiver.in_free_s

    def _payload_bytes(self, message: kv_transfer_pb2.FetchBlocksResponse) -> int:
        match message.WhichOneof("message"):
            case "sealed":
                return self._pages.total(message.sealed.block_ids)
            case "chunk":
                return len(message.chunk.data)
        return 0
