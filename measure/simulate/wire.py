"""Carries messages between the hosts of a simulated network, in virtual time.

Each message takes a latency; those of one direction of a call arrive in order. KV payload occupies the link of the
worker that sends it and that of the worker that receives it; transfers that share a link queue there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.v1 import kv_transfer_pb2
from measure.simulate.faults import Fate, FaultInjector
from measure.simulate.loop import VirtualLoop
from measure.simulate.messages import CallTerms, Status
from measure.simulate.records import NetworkShape

KEEPALIVE_S = 15.0
"""Time after which a broken connection is noticed: ping interval and timeout of `common.rpc`."""
_KV_METHOD = "/kvrelay.v1.KvTransferService/FetchBlocks"


class Carried(Protocol):
    """A call as the wire knows it. Hashed by identity."""

    @property
    def terms(self) -> CallTerms:
        """Its hosts and method."""

    def in_order(self, arrives_s: float, *, is_request: bool) -> float:
        """Return the earliest time of arrival behind all earlier messages of the direction."""

    def break_off(self, address: str) -> None:
        """End the call on both sides: the connection to a host is lost."""


@dataclass(slots=True)
class _Link:
    """Times at which a host's two directions are free again."""

    out_free_s: float = 0.0
    in_free_s: float = 0.0


class Wire:
    """Links of all hosts and the calls that are open on them. Event loop only."""

    def __init__(
        self,
        loop: VirtualLoop,
        shape: NetworkShape,
        *,
        block_bytes: int,
        extra_latency_s: Mapping[str, float] | None = None,
        faults: FaultInjector | None = None,
    ) -> None:
        """`extra_latency_s`: by full method name, for the messages that the server sends."""
        self.loop = loop
        self.faults = faults
        self.latency_s = shape.latency_s
        self._kv_bytes_per_s = shape.kv_bytes_per_s
        self._block_bytes = block_bytes
        self._extra_latency_s = dict(extra_latency_s or {})
        self._links: dict[str, _Link] = {}
        self._calls: dict[Carried, None] = {}

    @property
    def num_calls(self) -> int:
        """Calls that at least one side holds open."""
        return len(self._calls)

    def forget(self, call: Carried) -> None:
        """Drop a call that is over on both sides."""
        self._calls.pop(call, None)

    def send(self, call: Carried, message: object, *, is_request: bool, deliver: Callable[[Any], None]) -> float:
        """Deliver a message of a call in order; returns the time at which it has left the sender."""
        terms = call.terms
        now_s = left_s = self.loop.time()
        source, target = (terms.source, terms.target) if is_request else (terms.target, terms.source)
        arrives_s = now_s + self.latency_s
        if not is_request:
            if terms.method == _KV_METHOD and (num_bytes := self._payload_bytes(message)):
                left_s = self._transfer(source, target, num_bytes)
                arrives_s = left_s + self.latency_s
            arrives_s += self._extra_latency_s.get(terms.method, 0.0)
        copies = 1
        if self.faults is not None:
            fate, late_s = self.faults.fate(source, target)
            arrives_s += late_s
            if fate is Fate.LOSE:
                if isinstance(message, Status):
                    self.loop.call_later(KEEPALIVE_S, call.break_off, source)
                return left_s
            if fate is Fate.REPEAT and not isinstance(message, Status):
                copies = 2
        arrives_s = call.in_order(arrives_s, is_request=is_request)
        for _ in range(copies):
            self.loop.call_at(arrives_s, deliver, message)
        return left_s

    def _transfer(self, source: str, target: str, num_bytes: int) -> float:
        """Book both links; returns the time at which the last byte has passed them."""
        seconds = num_bytes / self._kv_bytes_per_s
        sender, receiver = (self._links.setdefault(host, _Link()) for host in (source, target))
        sender.out_free_s = max(self.loop.time(), sender.out_free_s) + seconds
        receiver.in_free_s = max(sender.out_free_s, receiver.in_free_s + seconds)
        return receiver.in_free_s

    def _payload_bytes(self, message: object) -> int:
        if not isinstance(message, kv_transfer_pb2.FetchBlocksResponse):
            return 0
        match message.WhichOneof("message"):
            case "sealed":
                return len(message.sealed.block_ids) * self._block_bytes
            case "chunk":
                return len(message.chunk.data)
        return 0
