"""The asyncio client in its event loop. Tests of both clients are in test_client.py."""

import asyncio

import pytest

from common.errors import Cancelled
from kvrelay.client import AsyncClient, Event, Token
from tests.client.fake_server import LIMIT_S, FakeInference, Hold
from tests.client.messages import accepted, completed, remote_plan, tokens


async def left(fake: FakeInference) -> bool:
    return await asyncio.to_thread(fake.client_left.wait, LIMIT_S)


async def test_next_batch_returns_what_came_together_and_nothing_at_the_end(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), remote_plan(), tokens(["a", "b", "c"], last="stop"), completed()]
    async with AsyncClient(address) as client, client.stream("Hi") as stream:
        batches = [len(batch) for batch in [await stream.next_batch() for _ in range(5)]]
        assert batches == [1, 1, 3, 1, 0]
        assert (await stream.result()).text == "abc"


async def test_client_made_outside_a_loop_works_inside_one(address: str) -> None:
    client = await asyncio.to_thread(AsyncClient, address)
    async with client:
        assert (await client.models())[0].name == "tiny"


async def test_break_out_of_a_stream_cancels_on_the_server(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), remote_plan(), tokens(["a"]), Hold()]
    async with AsyncClient(address) as client:
        async for event in client.stream("Hi"):
            if isinstance(event, Token):
                break
        assert await left(fake)


async def test_aclose_by_another_task_ends_the_iteration(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), Hold()]
    async with AsyncClient(address) as client:
        stream = client.stream("Hi")
        await anext(stream)

        async def read() -> list[Event]:
            return [event async for event in stream]

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            reader = group.create_task(read())
            await asyncio.sleep(0)
            await stream.aclose()
        assert reader.result() == []
        assert await left(fake)


async def test_cancelled_task_stays_cancelled_and_cancels_on_the_server(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), Hold()]
    async with AsyncClient(address) as client:
        generating = asyncio.create_task(client.generate("Hi"))
        assert await asyncio.to_thread(fake.asked.wait, LIMIT_S)
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating
        assert await left(fake)


@pytest.mark.parametrize("max_attempts", [None, 3])
async def test_close_of_the_client_ends_its_streams_with_cancelled(
    fake: FakeInference, address: str, max_attempts: int | None
) -> None:
    fake.script = [accepted(), Hold()]
    client = AsyncClient(address, max_attempts=max_attempts)
    stream = client.stream("Hi")
    await anext(stream)
    async with asyncio.timeout(LIMIT_S):
        reader = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(Cancelled):
            await reader
    assert await left(fake)
