"""A network inside one process, behind `common.rpc.Connect`: the generated stubs and the real servicers run on it.

Messages are handed over as objects, which nobody may change afterwards. Each takes a latency; those of one direction of
a call arrive in order. KV payload takes its bytes' time on the link of the worker that sends it and on that of the one
that receives it; transfers that share a link wait in line there.

What calls look like from both sides (statuses, cancellation, deadlines, closed channels) is in `client_call.py` and
`server_call.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvrelay.v1 import kv_transfer_pb2
from measure.simulate.client_call import ClientCall
from measure.simulate.faults import Fate, FaultInjector
from measure.simulate.loop import VirtualLoop
from measure.simulate.messages import CallTerms, Status
from measure.simulate.records import NetworkShape
from measure.simulate.server_call import ServerCall

KEEPALIVE_S = 15.0
"""A broken connection is noticed after this long: ping interval and timeout of `common.rpc`."""
_KV_METHOD = "/kvrelay.v1.KvTransferService/FetchBlocks"


@dataclass(slots=True)
class _Link:
    """When a host's two directions are free again."""

    out_free_s: float = 0.0
    in_free_s: float = 0.0


@dataclass(slots=True, eq=False)
class SimServer:
    """What the generated `add_…Servicer_to_server` functions and a call need of a server."""

    handlers: "dict[str, grpc.RpcMethodHandler[Any, Any]]" = field(default_factory=dict)

    def add_generic_rpc_handlers(self, handlers: Sequence[object]) -> None:
        """Do nothing: the same handlers come by `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve these methods."""
        for method, handler in handlers.items():
            self.handlers[f"/{service}/{method}"] = handler


class SimNetwork:
    """All hosts, by address. Event loop only."""

    def __init__(
        self,
        loop: VirtualLoop,
        shape: NetworkShape,
        *,
        block_bytes: int,
        extra_latency_s: Mapping[str, float] | None = None,
        faults: FaultInjector | None = None,
    ) -> None:
        """`extra_latency_s`: by full method name, of the messages that the server sends."""
        self.loop = loop
        self.faults = faults
        self._shape = shape
        self._block_bytes = block_bytes
        self._extra_latency_s = dict(extra_latency_s or {})
        self._servers: dict[str, SimServer] = {}
        self._links: dict[str, _Link] = {}
        self._calls: dict[ClientCall, None] = {}

    @property
    def num_calls(self) -> int:
        """Calls that one side at least still holds open."""
        return len(self._calls)

    def listen(self, address: str, server: SimServer) -> None:
        """Let a server be reached at an address."""
        self._servers[address] = server

    def crash(self, address: str) -> None:
        """The process at an address dies: its server is gone and every call of its own and to it breaks off."""
        self._servers.pop(address, None)
        for call in [call for call in self._calls if address in (call.terms.source, call.terms.target)]:
            call.break_off(address)

    def connect_from(self, source: str) -> Callable[[str], "SimChannel"]:
        """Return what makes channels from a host to others."""
        return lambda target: SimChannel(self, source, target)

    def server_at(self, address: str) -> SimServer | None:
        """Return who listens there."""
        return self._servers.get(address)

    # ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, call: ClientCall, request: object) -> None:
        """Bring a new call to its server."""
        self._calls[call] = None
        delay_s = self._shape.latency_s
        if self.faults is not None:
            fate, late_s = self.faults.fate(call.terms.source, call.terms.target)
            if fate is Fate.LOSE:
                self.loop.call_later(KEEPALIVE_S, call.break_off, call.terms.target)
                return
            delay_s += late_s
        arrives_s = call.in_order(self.loop.time() + delay_s, is_request=True)
        self.loop.call_at(arrives_s, self._accept, call, request)

    def _accept(self, call: ClientCall, request: object) -> None:
        if call.is_over:
            return
        server = self._servers.get(call.terms.target)
        handler = None if server is None else server.handlers.get(call.terms.method)
        if server is None or handler is None:
            code = grpc.StatusCode.UNAVAILABLE if server is None else grpc.StatusCode.UNIMPLEMENTED
            status = Status(code, f"{call.terms.target} does not serve {call.terms.method}")
            self.loop.call_later(self._shape.latency_s, call.finish, status)
            return
        call.served_by = ServerCall(self, call, handler, request)

    def forget(self, call: ClientCall) -> None:
        """The call is over on both sides."""
        self._calls.pop(call, None)

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, call: ClientCall, message: object, *, is_request: bool, deliver: Callable[[Any], None]) -> float:
        """Deliver one message of a call in order; returns when it has left the sender."""
        terms = call.terms
        now_s = left_s = self.loop.time()
        source, target = (terms.source, terms.target) if is_request else (terms.target, terms.source)
        arrives_s = now_s + self._shape.latency_s
        if not is_request:
            if terms.method == _KV_METHOD and (num_bytes := self._payload_bytes(message)):
                left_s = self._transfer(source, target, num_bytes)
                arrives_s = left_s + self._shape.latency_s
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
        """Book both links; returns when the last byte has passed them."""
        seconds = num_bytes / self._shape.kv_bytes_per_s
        sender, receiver = self._link(source), self._link(target)
        now_s = self.loop.time()
        sender.out_free_s = max(now_s, sender.out_free_s) + seconds
        receiver.in_free_s = max(sender.out_free_s, receiver.in_free_s + seconds)
        return receiver.in_free_s

    def _link(self, host: str) -> _Link:
        link = self._links.get(host)
        if link is None:
            link = self._links[host] = _Link()
        return link

    def _payload_bytes(self, message: object) -> int:
        if not isinstance(message, kv_transfer_pb2.FetchBlocksResponse):
            return 0
        match message.WhichOneof("message"):
            case "sealed":
                return len(message.sealed.block_ids) * self._block_bytes
            case "chunk":
                return len(message.chunk.data)
        return 0


class SimChannel(grpc.aio.Channel):
    """A channel of one host to another one."""

    def __init__(self, network: SimNetwork, source: str, target: str) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._calls: dict[ClientCall, None] = {}
        self._is_closed = False

    async def close(self, grace: float | None = None) -> None:
        """Cancel the calls that run. A grace is not waited for."""
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()

    def unary_unary(self, method: str, *_codecs: object, **_options: object) -> Any:
        """Return a function that makes a call with one request and one response, to be awaited."""
        return lambda request, *, timeout=None, metadata=None: self._call(method, timeout, metadata, request)

    unary_stream = unary_unary  # called alike; the call is read differently

    def stream_stream(self, method: str, *_codecs: object, **_options: object) -> Any:
        """Return a function that makes a call whose requests are written one by one."""
        return lambda *, timeout=None, metadata=None: self._call(method, timeout, metadata, None)

    def stream_unary(self, method: str, *_codecs: object, **_options: object) -> Any:
        """Raise: no service of ours has such a method."""
        raise NotImplementedError(method)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        """Return READY while somebody listens."""
        if self._network.server_at(self._target) is None:
            return grpc.ChannelConnectivity.TRANSIENT_FAILURE
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Raise: nobody of ours waits for it in a simulation."""
        raise NotImplementedError("wait_for_state_change")

    async def channel_ready(self) -> None:
        """Raise, too."""
        raise NotImplementedError("channel_ready")

    async def __aenter__(self) -> "SimChannel":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def _call(self, method: str, timeout_s: float | None, metadata: Any, request: object) -> ClientCall:
        if self._is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        deadline_s = None if timeout_s is None else self._network.loop.time() + timeout_s
        terms = CallTerms(
            source=self._source,
            target=self._target,
            method=method,
            deadline_s=deadline_s,
            metadata=tuple(metadata or ()),
        )
        call = ClientCall(self._network, terms, on_over=self._forget)
        self._calls[call] = None
        self._network.open(call, request)
        return call

    def _forget(self, call: ClientCall) -> None:
        self._calls.pop(call, None)
