"""All calls to a worker on one stream: no call affects another."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import EngineFault, InvalidRequest
from kvrelay.v1 import decode_pb2, inference_pb2
from router.fleet.decode_stream import DecodeStream
from tests.router.fake_worker import DECODE, FakeWorker, answer, pair
from tests.router.fakes import Reply, config_with, make_request, prompt_of, running_cluster


async def test_requests_side_by_side_are_answered_over_one_stream() -> None:
    prefill, decode = pair()
    async with running_cluster(prefill, decode, config=config_with()) as cluster:
        replies = await asyncio.gather(*(cluster.generate(make_request(10 + i, max_tokens=9)) for i in range(6)))
        for i, reply in enumerate(replies):
            assert reply.token_ids() == answer(prompt_of(10 + i), 9)
        assert decode.num_streams == 1
        await cluster.until_idle()


async def test_cancel_of_one_of_many_cancels_its_call_alone() -> None:
    decode = FakeWorker("d0", DECODE)
    decode.gates.close("token 3")
    async with running_cluster(decode) as cluster:
        calls: list[Any] = [cluster.inference.Generate(make_request(10 + i, max_tokens=6)) for i in range(3)]
        for call in calls:
            while not (await call.read()).HasField("tokens"):
                pass
        calls[1].cancel()
        await cluster.until(lambda _router: decode.calls["cancelled"])
        assert decode.num_running_calls == 2
        decode.gates.open("token 3")
        for i in (0, 2):
            reply = Reply()
            await cluster.read(_rest(calls[i]), reply)
            assert reply.completed.usage.num_output_tokens == 6
        await cluster.until_idle()
        assert decode.num_streams == 1


async def _rest(call: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """Yield the messages after those that were `read`."""
    while message := await call.read():
        yield message


async def test_client_that_does_not_read_blocks_no_other_and_misses_nothing() -> None:
    decode = FakeWorker("d0", DECODE)
    async with running_cluster(decode) as cluster:
        lazy: Any = cluster.inference.Generate(make_request(10, max_tokens=150))
        assert (await lazy.read()).HasField("accepted")
        for i in range(3):
            reply = await cluster.generate(make_request(20 + i, max_tokens=40))
            assert reply.token_ids() == answer(prompt_of(20 + i), 40)
        reply = Reply()
        await cluster.read(_rest(lazy), reply)
        assert reply.token_ids() == answer(prompt_of(10), 150)
        await cluster.until_idle()


async def test_death_of_the_worker_fails_every_call_and_a_new_life_gets_a_new_stream() -> None:
    decode = FakeWorker("d0", DECODE)
    decode.gates.close("token 3")
    async with running_cluster(decode, config=config_with()) as cluster:
        generating = [asyncio.create_task(cluster.generate(make_request(10 + i, max_tokens=8))) for i in range(4)]
        await cluster.until(lambda _router: decode.num_running_calls == 4)
        await decode.gates.reached("token 3")
        await decode.restart()
        decode.gates.open("token 3")
        for i, task in enumerate(generating):
            reply = await task
            assert reply.token_ids() == answer(prompt_of(10 + i), 8)
            assert reply.completed.num_attempts == 2
        assert decode.num_streams == 2
        await cluster.until_idle()


class Wire:
    """A stream call whose messages a test makes."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[decode_pb2.DecodeManyResponse | None] = asyncio.Queue()
        self.written: list[decode_pb2.DecodeManyRequest] = []

    def __aiter__(self) -> "Wire":
        return self

    async def __anext__(self) -> decode_pb2.DecodeManyResponse:
        message = await self.incoming.get()
        if message is None:
            raise StopAsyncIteration
        return message

    async def write(self, message: decode_pb2.DecodeManyRequest) -> None:
        self.written.append(message)

    def cancel(self) -> bool:
        return True

    def say(
        self, *call_ids: int, end: int | None = None, status: bytes = b"", awaits_acknowledgement: bool = False
    ) -> None:
        message = decode_pb2.DecodeManyResponse(awaits_acknowledgement=awaits_acknowledgement)
        for call_id in call_ids:
            update = message.updates.add(call_id=call_id, responses=[decode_pb2.DecodeResponse()])
            if end is not None:
                update.status_code, update.status = end, status
        self.incoming.put_nowait(message)


def wired() -> tuple[Wire, DecodeStream]:
    """Return the worker's end of a stream and the router's."""
    wire = Wire()
    return wire, DecodeStream(wire)  # type: ignore[arg-type]


async def test_call_that_cannot_be_sent_ends_the_stream_and_all_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire, stream = wired()

    async def fail(_message: decode_pb2.DecodeManyRequest) -> None:
        raise MemoryError

    first = stream.open(decode_pb2.DecodeRequest())
    await asyncio.sleep(0)
    monkeypatch.setattr(wire, "write", fail)
    for call in (first, stream.open(decode_pb2.DecodeRequest())):
        with pytest.raises(EngineFault, match="cannot be sent"):
            await call.receive()
    assert stream.is_over


async def test_follow_hands_over_what_came_before_and_what_comes_until_enough() -> None:
    wire, stream = wired()
    call = stream.open(decode_pb2.DecodeRequest())
    seen: list[int] = []

    def take(_message: decode_pb2.DecodeResponse) -> bool:
        seen.append(1)
        return len(seen) == 3

    wire.say(1)
    assert await call.receive() is not None
    wire.say(1)
    await asyncio.sleep(0)
    following = asyncio.create_task(call.follow(take))
    for _ in range(3):
        wire.say(1)
    wire.say(1, end=0)
    await following
    assert len(seen) == 3
    assert await call.receive() is not None
    assert await call.receive() is not None
    assert await call.receive() is None
    await stream.aclose()


async def test_handler_that_fails_ends_only_its_own_call() -> None:
    wire, stream = wired()
    bad, good = stream.open(decode_pb2.DecodeRequest()), stream.open(decode_pb2.DecodeRequest())

    def fail(_message: decode_pb2.DecodeResponse) -> bool:
        raise InvalidRequest("no")

    failing = asyncio.create_task(bad.follow(fail))
    await asyncio.sleep(0)
    wire.say(1, 2)
    with pytest.raises(InvalidRequest):
        await failing
    assert await good.receive() is not None
    await stream.aclose()


async def test_unreadable_status_fails_every_call_and_ends_the_stream() -> None:
    wire, stream = wired()
    call = stream.open(decode_pb2.DecodeRequest())
    wire.say(1, end=13, status=b"\xff")
    await call.receive()
    with pytest.raises(EngineFault, match="cannot be read"):
        await call.receive()
    assert stream.is_over


async def test_close_is_sent_once_and_not_after_the_end() -> None:
    wire, stream = wired()
    with stream.open(decode_pb2.DecodeRequest()):
        await asyncio.sleep(0)
    with stream.open(decode_pb2.DecodeRequest()) as ended:
        wire.say(2, end=0)
        await ended.receive()
        assert await ended.receive() is None
    await asyncio.sleep(0)
    sent = [each for first in wire.written for each in (first, *first.others)]
    assert [(m.call_id, m.WhichOneof("message")) for m in sent] == [(1, "open"), (1, "close"), (2, "open")]
    await stream.aclose()


async def test_calls_that_wait_for_a_write_go_together() -> None:
    wire, stream = wired()
    calls = [stream.open(decode_pb2.DecodeRequest()) for _ in range(3)]
    await asyncio.sleep(0)
    assert [(m.call_id, [other.call_id for other in m.others]) for m in wire.written] == [(1, [2, 3])]
    for call in calls:
        with call:
            pass
    await stream.aclose()


async def test_call_that_is_closed_before_it_is_sent_costs_the_worker_nothing() -> None:
    wire, stream = wired()
    with stream.open(decode_pb2.DecodeRequest()):
        pass
    with stream.open(decode_pb2.DecodeRequest()):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [(m.call_id, m.WhichOneof("message")) for m in wire.written] == [(2, "open"), (2, "close")]
    await stream.aclose()


async def test_response_is_acknowledged_once_its_parts_have_reached_their_calls() -> None:
    wire, stream = wired()
    call = stream.open(decode_pb2.DecodeRequest())
    wire.say(1)
    await call.receive()
    wire.say(1, awaits_acknowledgement=True)
    await call.receive()
    await asyncio.sleep(0)
    assert [m.WhichOneof("message") for m in wire.written] == ["open", "acknowledgement"]
    await stream.aclose()
