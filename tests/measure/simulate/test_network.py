"""Calls over the simulated network look like calls over grpc.aio, from both sides."""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import copy_context
from typing import Any

import grpc
import pytest

from common.errors import HandoffGone, WorkerLost, from_rpc_error
from common.rpc import abort, error_boundary
from kvrelay.v1 import kv_transfer_pb2
from measure.simulate.faults import FaultRates, SeededFaults, Transmission
from measure.simulate.loop import PROCESS, VirtualLoop
from measure.simulate.network import SimChannel, SimNetwork, SimServer
from measure.simulate.records import NetworkShape
from measure.simulate.wire import KEEPALIVE_S
from tests.measure.simulate.builders import current_loop, on_virtual_loop

LATENCY_S = 0.25
SHAPE = NetworkShape(latency_s=LATENCY_S, kv_bytes_per_s=1000.0)
WELL = (Transmission.ONCE, 0.0)
Test = Callable[..., Awaitable[None]]


class Scene:
    """One server at "server:1" and a channel to it from "client:1"."""

    def __init__(self, loop: VirtualLoop, faults: Any) -> None:
        self.loop = loop
        self.network = SimNetwork(loop, SHAPE, block_bytes=100, faults=faults)
        self.server = SimServer()
        self.network.listen("server:1", self.server)
        self.channel: SimChannel = self.network.connect_from("client:1")("server:1")
        self.told: list[Any] = []

    def serve(self, handler: Any, *, name: str = "Call") -> None:
        self.server.add_registered_method_handlers("test.Service", {name: handler})

    def unary(self, behavior: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        self.serve(grpc.unary_unary_rpc_method_handler(behavior))
        return self.channel.unary_unary("/test.Service/Call", None, None, _registered_method=True)

    def stream(self, behavior: Callable[[Any, Any], Any]) -> Any:
        self.serve(grpc.unary_stream_rpc_method_handler(behavior))
        return self.channel.unary_stream("/test.Service/Call", None, None, _registered_method=True)

    def both(self, behavior: Callable[[Any, Any], Any]) -> Any:
        self.serve(grpc.stream_stream_rpc_method_handler(behavior))
        return self.channel.stream_stream("/test.Service/Call", None, None, _registered_method=True)


class Script:
    """Fates of messages in order; all later ones arrive."""

    def __init__(self, *transmissions: tuple[Transmission, float]) -> None:
        self._transmissions = list(transmissions)

    def damaged(self, message: kv_transfer_pb2.FetchBlocksResponse) -> kv_transfer_pb2.FetchBlocksResponse:
        return message

    hear_apart = False

    def notice_s(self) -> float:
        return 0.0

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
    for number in range(request):
        await context.write(number)


async def failure_of(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """Return the error of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@on_virtual_time()
async def test_unary_call_takes_a_latency_each_way(scene: Scene) -> None:
    async def double(request: int, context: Any) -> int:
        return 2 * request

    assert await scene.unary(double)(21, timeout=5.0) == 42
    assert scene.loop.time() == 2 * LATENCY_S


@on_virtual_time()
async def test_stream_messages_arrive_in_order_and_end_well(scene: Scene) -> None:
    call = scene.stream(numbers)(3)
    assert [message async for message in call] == [0, 1, 2]
    assert await call.code() is grpc.StatusCode.OK


@on_virtual_time()
async def test_status_of_our_errors_comes_back_as_the_same_class(scene: Scene) -> None:
    async def fail(request: int, context: Any) -> None:
        await context.write(1)
        async with error_boundary(context, "Call"):
            raise HandoffGone("it is gone", field="handoff_id")

    call = scene.stream(fail)(0)
    assert await anext(call) == 1
    error = from_rpc_error(await failure_of(anext(call)))
    assert isinstance(error, HandoffGone) and error.message == "it is gone" and error.field == "handoff_id"


@on_virtual_time()
async def test_handler_that_raises_something_else_ends_the_call_with_unknown(scene: Scene) -> None:
    async def fail(request: int, context: Any) -> int:
        raise ZeroDivisionError("oops")

    assert (await failure_of(scene.unary(fail)(0))).code() is grpc.StatusCode.UNKNOWN


async def hang(request: int, context: Any) -> None:
    await context.write(0)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        hang_ended.append(asyncio.get_running_loop().time())


hang_ended: list[float] = []


@on_virtual_time()
async def test_cancel_raises_here_and_cancels_the_handler_a_latency_later(scene: Scene) -> None:
    hang_ended.clear()
    call = scene.stream(hang)(0)
    await anext(call)
    assert call.cancel()
    assert not call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await anext(call)
    await asyncio.sleep(1.0)
    assert hang_ended == [3 * LATENCY_S]


@on_virtual_time()
async def test_cancelling_a_task_that_reads_cancels_its_call(scene: Scene) -> None:
    hang_ended.clear()
    call = scene.stream(hang)(0)
    await anext(call)
    reading = asyncio.ensure_future(anext(call))
    await asyncio.sleep(1.0)
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled() and call.cancelled()
    await asyncio.sleep(1.0)
    assert hang_ended == [2 * LATENCY_S + 1.0 + LATENCY_S]


@on_virtual_time()
async def test_cancel_before_the_call_has_arrived_never_starts_its_handler(scene: Scene) -> None:
    hang_ended.clear()
    scene.stream(hang)(0).cancel()
    await asyncio.sleep(1.0)
    assert hang_ended == []


@on_virtual_time()
async def test_deadline_ends_the_call_on_both_sides(scene: Scene) -> None:
    hang_ended.clear()
    call = scene.stream(hang)(0, timeout=2.0)
    await anext(call)
    assert call.time_remaining() == 2.0 - 2 * LATENCY_S
    assert (await failure_of(anext(call))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert scene.loop.time() == 2.0
    await asyncio.sleep(1.0)
    assert hang_ended == [2.0 + LATENCY_S]


@on_virtual_time()
async def test_closing_the_channel_cancels_what_runs_on_it(scene: Scene) -> None:
    call = scene.stream(hang)(0)
    await anext(call)
    await scene.channel.close()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    with pytest.raises(grpc.aio.UsageError):
        scene.channel.unary_unary("/test.Service/Call")(0)


@pytest.mark.parametrize("crashed", ["client:1", "server:1"])
@on_virtual_time()
async def test_crash_of_either_side_breaks_the_call_off(scene: Scene, crashed: str) -> None:
    hang_ended.clear()
    call = scene.stream(hang)(0)
    await anext(call)
    scene.network.crash(crashed)
    assert isinstance(from_rpc_error(await failure_of(anext(call))), WorkerLost)
    await asyncio.sleep(1.0)
    assert len(hang_ended) == 1


@on_virtual_time()
async def test_call_to_a_host_without_server_is_unavailable(scene: Scene) -> None:
    scene.network.crash("server:1")
    assert scene.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
    assert (await failure_of(scene.unary(hang)(0))).code() is grpc.StatusCode.UNAVAILABLE


@on_virtual_time()
async def test_both_sides_of_a_two_way_stream_talk_and_half_close(scene: Scene) -> None:
    async def echo(requests: AsyncIterator[int], context: Any) -> None:
        async for request in requests:
            await context.write(-request)
        await context.write("end")

    call = scene.both(echo)()
    await call.write(1)
    await call.write(2)
    assert [await call.read(), await call.read()] == [-1, -2]
    await call.done_writing()
    assert await call.read() == "end"
    assert await call.read() is grpc.aio.EOF
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(3)


@on_virtual_time()
async def test_abort_goes_out_with_its_trailing_metadata(scene: Scene) -> None:
    async def refuse(request: int, context: Any) -> int:
        await abort(context, HandoffGone("no"))
        return 0

    error = await failure_of(scene.unary(refuse)(0))
    assert [key for key, _value in error.trailing_metadata()] == ["grpc-status-details-bin"]


def _sealed(num_blocks: int) -> kv_transfer_pb2.FetchBlocksResponse:
    return kv_transfer_pb2.FetchBlocksResponse(sealed=kv_transfer_pb2.SealedBlocks(block_ids=range(num_blocks)))


@on_virtual_time()
async def test_kv_payload_waits_for_both_links(scene: Scene) -> None:
    arrived: dict[str, float] = {}

    async def fetch(requests: AsyncIterator[int], context: Any) -> None:
        async for request in requests:
            await context.write(_sealed(request))

    async def pull(scene: Scene, source: str, target: str, num_blocks: int) -> None:
        call = scene.network.connect_from(source)(target).stream_stream("/kvrelay.v1.KvTransferService/FetchBlocks")()
        await call.write(num_blocks)
        await call.read()
        arrived[f"{source}<{target}"] = scene.loop.time()
        call.cancel()

    for host in ("a:1", "b:1"):
        server = SimServer()
        handler: Any = grpc.stream_stream_rpc_method_handler(fetch)
        server.add_registered_method_handlers("kvrelay.v1.KvTransferService", {"FetchBlocks": handler})
        scene.network.listen(host, server)
    # 100 bytes a block, 1000 bytes a second on each link.
    await asyncio.gather(pull(scene, "x:1", "a:1", 10), pull(scene, "y:1", "a:1", 20), pull(scene, "x:1", "b:1", 5))
    there_and_back_s = 2 * LATENCY_S
    assert arrived == {
        "x:1<a:1": there_and_back_s + 1.0,
        "y:1<a:1": there_and_back_s + 3.0,  # behind the first one on the link of a
        "x:1<b:1": there_and_back_s + 1.5,  # behind the first one on the link of x
    }


@on_virtual_time(WELL, (Transmission.LOST, 0.0), (Transmission.DUPLICATED, 0.0), (Transmission.ONCE, 3.0))
async def test_faults_lose_repeat_and_delay_single_messages_of_a_stream_in_order(scene: Scene) -> None:
    call = scene.stream(numbers)(4)
    assert [message async for message in call] == [1, 1, 2, 3]
    assert scene.loop.time() == 2 * LATENCY_S + 3.0


async def assert_connection_breaks(scene: Scene) -> None:
    async def nothing(request: int, context: Any) -> None:
        return

    assert (await failure_of(anext(scene.stream(nothing)(0)))).code() is grpc.StatusCode.UNAVAILABLE
    assert scene.loop.time() >= KEEPALIVE_S


@on_virtual_time((Transmission.LOST, 0.0))
async def test_without_its_first_message_a_calls_connection_is_broken(scene: Scene) -> None:
    await assert_connection_breaks(scene)


@on_virtual_time(WELL, (Transmission.LOST, 0.0))
async def test_without_its_last_message_a_calls_connection_is_broken(scene: Scene) -> None:
    await assert_connection_breaks(scene)


def test_seeded_faults_come_at_their_rates_and_are_the_same_for_the_same_seed() -> None:
    rates = FaultRates(lose=0.1, repeat=0.2, delay=0.3, max_delay_s=2.0)

    def draws(seed: int) -> list[tuple[Transmission, float]]:
        faults = SeededFaults(rates, seed=seed, now_s=lambda: 0.0)
        return [faults.transmission("a", "b") for _ in range(4000)]

    transmissions = draws(1)
    assert transmissions == draws(1) != draws(2)
    assert 300 < sum(transmission is Transmission.LOST for transmission, _late_s in transmissions) < 500
    assert 650 < sum(transmission is Transmission.DUPLICATED for transmission, _late_s in transmissions) < 950
    late = [late_s for _transmission, late_s in transmissions if late_s]
    assert 1050 < len(late) < 1350 and max(late) <= 2.0


def test_seeded_faults_a_host_that_stalls_delays_all_that_it_sends_until_it_goes_on() -> None:
    now_s = 0.0
    faults = SeededFaults(FaultRates(stall=1.0, stall_s=3.0), seed=1, now_s=lambda: now_s)
    assert faults.transmission("a", "b") == (Transmission.ONCE, 3.0)
    faults.is_quiet = True
    assert faults.transmission("a", "b") == (Transmission.ONCE, 0.0)


@on_virtual_time()
async def test_cut_holds_what_arrives_in_its_direction_until_it_heals(scene: Scene) -> None:
    cuts, back = scene.network.cuts, ("server:1", "client:1")
    cuts.cut(back)
    cuts.cut(back)
    scene.loop.call_later(1.0, cuts.heal, back)
    scene.loop.call_later(2.0, cuts.heal, back)
    scene.loop.call_later(1.5, lambda: scene.told.append(cuts.parts("client:1", "server:1")))
    assert [message async for message in scene.stream(numbers)(3)] == [0, 1, 2]
    assert scene.loop.time() == 2.0
    assert scene.told == [True]
    assert not cuts.parts("client:1", "server:1")


@on_virtual_time()
async def test_message_of_a_sender_that_is_stopped_afterwards_arrives(scene: Scene) -> None:
    context = copy_context()
    context.run(PROCESS.set, "server")
    scene.server.context = context

    async def two(request: int, context: Any) -> None:
        await context.write(1)
        scene.loop.stop_process("server")
        await asyncio.sleep(0.1)
        await context.write(2)

    call = scene.stream(two)(0)
    assert await anext(call) == 1
    scene.loop.call_later(5.0, scene.loop.continue_process, "server")
    assert await anext(call) == 2
    assert scene.loop.time() > 5.0
    await anext(call, None)
