import asyncio

import pytest

from common.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded, Unreachable
from kvrelay.client import AsyncClient, Event, Token
from tests.client.fake_server import LIMIT_S, FakeInference, Hold, accepted, completed, remote_plan, tokens


async def left(fake: FakeInference) -> bool:
    return await asyncio.to_thread(fake.client_left.wait, LIMIT_S)


async def test_generate_returns_the_whole_answer(address: str) -> None:
    async with AsyncClient(address) as client:
        generation = await client.generate([1, 2, 3], max_tokens=2)
    assert generation.text == "Hello world"
    assert generation.transfer.num_blocks == 2


async def test_stream_yields_tokens_and_result_has_the_rest(address: str) -> None:
    async with AsyncClient(address) as client, client.stream("Hi") as stream:
        texts = [event.text async for event in stream if isinstance(event, Token)]
        assert texts == ["Hello", " world"]
        assert (await stream.result()).usage.num_output_tokens == 2


async def test_next_batch_returns_what_came_together_and_nothing_at_the_end(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), remote_plan(), tokens(["a", "b", "c"], last="stop"), completed()]
    async with AsyncClient(address) as client, client.stream("Hi") as stream:
        batches = [len(batch) for batch in [await stream.next_batch() for _ in range(5)]]
        assert batches == [1, 1, 3, 1, 0]
        assert (await stream.result()).text == "abc"


async def test_chat_and_stream_chat_send_conversations(fake: FakeInference, address: str) -> None:
    async with AsyncClient(address) as client:
        assert (await client.chat("Hi")).text == "Hello world"
        assert (await client.stream_chat("Hi").result()).text == "Hello world"
    assert [request.chat.messages[0].role for request in fake.generate_requests] == ["user", "user"]


async def test_client_made_outside_a_loop_works_inside_one(address: str) -> None:
    client = await asyncio.to_thread(AsyncClient, address)
    async with client:
        assert (await client.models())[0].name == "tiny"


async def test_aclose_of_a_stream_cancels_on_the_server(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), remote_plan(), tokens(["a"]), Hold()]
    async with AsyncClient(address) as client:
        stream = client.stream("Hi")
        await anext(stream)
        await stream.aclose()
        assert await left(fake)
        assert [event async for event in stream] == []
        with pytest.raises(Cancelled):
            await stream.result()


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
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.generate("Hi")
        assert await left(fake)


async def test_close_of_the_client_ends_its_streams_with_cancelled(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), Hold()]
    client = AsyncClient(address)
    stream = client.stream("Hi")
    await anext(stream)
    async with asyncio.timeout(LIMIT_S):
        reader = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(Cancelled):
            await reader
    assert await left(fake)


async def test_timeout_raises_deadline_exceeded(fake: FakeInference, address: str) -> None:
    fake.script = [accepted(), Hold()]
    async with AsyncClient(address, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("Hi")


async def test_explain_returns_decisions(fake: FakeInference, address: str) -> None:
    async with AsyncClient(address) as client:
        complete, _ = await client.explain("req-1")
    assert (complete.outcome.ended, len(complete.candidates)) == ("completed", 2)
    assert fake.explain_requests[0].request_id == "req-1"


async def test_errors_are_typed(fake: FakeInference, address: str) -> None:
    async with AsyncClient(address) as client:
        fake.script = [InvalidRequest("bad", field="prompt")]
        with pytest.raises(InvalidRequest) as invalid:
            await client.generate("")
        assert invalid.value.field == "prompt"
        fake.unary_error = Overloaded("busy", retry_after_s=3)
        with pytest.raises(Overloaded) as busy:
            await client.status()
        assert busy.value.retry_after_s == 3


async def test_call_without_a_server_raises_unreachable() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
            await client.tokenize("Hi")
        with pytest.raises(Unreachable):
            await client.generate("Hi")
