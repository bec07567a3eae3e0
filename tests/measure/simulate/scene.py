"""A server and a client on the simulated network; a test decides what becomes of each message."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from measure.simulate.faults import FaultRates, SeededFaults, Transmission
from measure.simulate.loop import VirtualLoop
from measure.simulate.network import SimChannel, SimNetwork, SimServer
from measure.simulate.records import NetworkShape
from measure.simulate.wire import KEEPALIVE_S, PageBytes
from tests.measure.simulate.builders import current_loop, on_virtual_loop

LATENCY_S = 0.25
SHAPE = NetworkShape(latency_s=LATENCY_S, kv_bytes_per_s=1000.0)
Test = Callable[..., Awaitable[None]]


class Scene:
    """One server at "server:1" and a channel to it from "client:1"."""

    def __init__(self, loop: VirtualLoop, faults: Any) -> None:
        self.loop = loop
        self.network = SimNetwork(loop, SHAPE, pages=PageBytes(block=100), faults=faults)
        self.server = SimServer()
        self.network.listen("server:1", self.server)
        self.channel: SimChannel = self.network.connect_from("client:1")("server:1")
        self.told: list[Any] = []

    def serve(self, handler: Any) -> None:
        self.server.add_registered_method_handlers("test.Service", {"Call": handler})

    def unary(self, behavior: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        self.serve(grpc.unary_unary_rpc_method_handler(behavior))
        return self.channel.unary_unary("/test.Service/Call", None, None, _registered_method=True)

    def stream(self, behavior: Callable[[Any, Any], Any]) -> Any:
        self.serve(grpc.unary_stream_rpc_method_handler(behavior))
        return self.channel.unary_stream("/test.Service/Call", None, None, _registered_method=True)

    def both(self, behavior: Callable[[Any, Any], Any]) -> Any:
        self.serve(grpc.stream_stream_rpc_method_handler(behavior))
        return self.channel.stream_stream("/test.Service/Call", None, None, _registered_method=True)


class Script(SeededFaults):
    """Fates of messages in order; all later ones arrive."""

    def __init__(self, *transmissions: tuple[Transmission, float]) -> None:
        super().__init__(FaultRates(), seed=0, now_s=lambda: 0.0)
        self._transmissions = list(transmissions)

    def transmission(self, source: str, target: str) -> tuple[Transmission, float]:
        return self._transmissions.pop(0) if self._transmissions else (Transmission.ONCE, 0.0)


def on_virtual_time(*transmissions: tuple[Transmission, float]) -> Callable[[Test], Callable[..., None]]:
    """Run a test with a scene of its own, whose first messages have these transmissions. Nothing may be left behind."""

    def decorate(test: Test) -> Callable[..., None]:
        @on_virtual_loop
        @functools.wraps(test)
        async def run(**values: Any) -> None:
            scene = Scene(current_loop(), Script(*transmissions))
            await test(scene, **values)
            await asyncio.sleep(2 * KEEPALIVE_S)
            assert scene.network.num_calls == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}

        _scene, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate


async def numbers(request: int, context: Any) -> None:
    """Answer with as many numbers as asked for."""
    for number in range(request):
        await context.write(number)


async def failure_of(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """Return the error of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value
