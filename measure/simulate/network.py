"""A network inside one process, behind `common.rpc.Connect`: the generated stubs and the real servicers run on it.

Messages are handed over as objects, which must not change afterwards; `wire.py` lets them take their time. The two ends
of a call (statuses, cancellation, deadlines, closed channels) are in `client_call.py` and `server_call.py`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

import grpc

from measure.simulate.client_call import ClientCall
from measure.simulate.faults import Transmission
from measure.simulate.loop import VirtualLoop
from measure.simulate.records import NetworkShape
from measure.simulate.server_call import ServerCall
from measure.simulate.wire import CallTerms, Carried, Status, Wire


@dataclass(slots=True, eq=False)
class SimServer:
    """The part of a server that the generated `add_…Servicer_to_server` functions and calls need."""

    handlers: "dict[str, grpc.RpcMethodHandler[Any, Any]]" = field(default_factory=dict)
    context: Context = field(default_factory=copy_context)
    """Context of the process that serves; handlers run in copies of it."""

    def add_generic_rpc_handlers(self, handlers: Sequence[object]) -> None:
        """Do nothing: the same handlers come by `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve these methods."""
        for method, handler in handlers.items():
            self.handlers[f"/{service}/{method}"] = handler


class SimNetwork(Wire):
    """All hosts, by address. Event loop only."""

    def __init__(self, loop: VirtualLoop, shape: NetworkShape, **options: Any) -> None:
        """`options`: those of `Wire`."""
        super().__init__(loop, shape, **options)
        self._servers: dict[str, SimServer] = {}
        self._channels: dict[str, dict[SimChannel, None]] = {}
        """Channels that wait for another state, by target."""

    def listen(self, address: str, server: SimServer) -> None:
        """Make a server reachable at an address."""
        self._servers[address] = server
        self._wake(address)

    def crash(self, address: str) -> None:
        """Remove the server at an address and break off every call from it and to it.

        Where calls hear of it one by one, one that is on its way there goes on, as it does while it waits for its
        connection: it may reach the next server at the address.
        """
        self._servers.pop(address, None)
        self._wake(address)
        is_later_heard = self.faults is not None and self.faults.hear_apart
        for call in self._calls_of(address):
            is_on_its_way = is_later_heard and call.served_by is None and call.terms.target == address
            if not is_on_its_way:
                self.part(call, address, is_dead=True)

    def break_off(self, address: str, peer: str | None = None) -> None:
        """End every call from an address and to it, or those between it and a peer: their connections are lost."""
        for call in self._calls_of(address, peer):
            self.part(call, address, is_dead=False)

    def _calls_of(self, address: str, peer: str | None = None) -> list[Carried]:
        """Return the calls from an address and to it, or those between it and a peer."""
        ends = ((call, (call.terms.source, call.terms.target)) for call in self._calls)
        return [call for call, hosts in ends if address in hosts and (peer is None or peer in hosts)]

    def connect_from(self, source: str) -> Callable[[str], "SimChannel"]:
        """Return the function that makes channels from a host to others."""
        return lambda target: SimChannel(self, source, target)

    def wait(self, channel: "SimChannel", target: str) -> None:
        """Wake a channel, once, when a server starts or stops listening at its target."""
        self._channels.setdefault(target, {})[channel] = None

    def _wake(self, address: str) -> None:
        for channel in self._channels.pop(address, ()):
            channel.wake()

    def server_at(self, address: str) -> SimServer | None:
        """Return the server at an address; None without one."""
        return self._servers.get(address)

    def open(self, call: ClientCall, request: object) -> None:
        """Carry a new call to its server."""
        self._calls[call] = None
        delay_s = self.latency_s
        if self.faults is not None:
            transmission, late_s = self.faults.transmission(call.terms.source, call.terms.target)
            if transmission is Transmission.LOST:
                self.break_off_later(call, call.terms.target)
                return
            delay_s += late_s
        arrives_s = call.in_order(self.loop.time() + delay_s, is_request=True)
        direction = (call.terms.source, call.terms.target)
        self.arrive_at(arrives_s, direction, self._accept, call, request)

    def _accept(self, call: ClientCall, request: object) -> None:
        if call.is_over:
            return
        server = self._servers.get(call.terms.target)
        handler = None if server is None else server.handlers.get(call.terms.method)
        if server is None or handler is None:
            code = grpc.StatusCode.UNAVAILABLE if server is None else grpc.StatusCode.UNIMPLEMENTED
            status = Status(code, f"{call.terms.target} does not serve {call.terms.method}")
            self.loop.call_later(self.latency_s, call.finish, status)
            return
        call.served_by = ServerCall(self, call, handler, request, server.context.copy())


class SimChannel(grpc.aio.Channel):
    """A channel from one host to another."""

    def __init__(self, network: SimNetwork, source: str, target: str) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._calls: dict[ClientCall, None] = {}
        self._is_closed = False
        self._waiting: list[asyncio.Future[None]] = []

    async def close(self, grace: float | None = None) -> None:
        """Cancel the running calls at once, whatever the grace."""
        self._is_closed = True
        self.wake()
        for call in list(self._calls):
            call.cancel()

    def unary_unary(self, method: str, *_codecs: object, **_options: object) -> Any:
        """Return a function that makes a call with one request and one response."""
        return lambda request, *, timeout=None, metadata=None: self._call(method, timeout, metadata, request)

    unary_stream = unary_unary  # only read differently

    def stream_stream(self, method: str, *_codecs: object, **_options: object) -> Any:
        """Return a function that makes a call whose requests are written one by one."""
        return lambda *, timeout=None, metadata=None: self._call(method, timeout, metadata, None)

    def stream_unary(self, method: str, *_codecs: object, **_options: object) -> Any:
        """Raise: no service of ours has such a method."""
        raise NotImplementedError(method)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        """Return READY while a server listens, SHUTDOWN once closed."""
        if self._is_closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        if self._network.server_at(self._target) is None:
            return grpc.ChannelConnectivity.TRANSIENT_FAILURE
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until a server starts or stops listening, or the channel is closed, unless the state differs already."""
        if self.get_state() is last_observed_state:
            changed = self._network.loop.create_future()
            self._waiting.append(changed)
            self._network.wait(self, self._target)
            await changed

    def wake(self) -> None:
        """Let those look again that wait for another state."""
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)

    async def channel_ready(self) -> None:
        """Raise: our code never waits for it in a simulation."""
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
