"""Calls over the simulated network look like calls over grpc.aio, from both sides."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from common.errors import HandoffGone, WorkerLost, from_rpc_error
from common.rpc import abort, error_boundary
from kvrelay.v1 import kv_transfer_pb2
from measure.simulate.network import SimServer
from tests.measure.simulate.scene import LATENCY_S, Scene, failure_of, numbers, on_virtual_time


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
