"""Anthropic's own client in front of real workers."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.in_process import System
from tests.e2e.test_messages import FORCED, SAMPLED, TURNS, WEATHER

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS: dict[str, Any] = {
    "model": "fake",
    "max_tokens": SAMPLED["max_tokens"],
    # newer clients do not name temperature
    "extra_body": {name: value for name, value in SAMPLED.items() if name != "max_tokens"},
}


@pytest_asyncio.fixture(loop_scope="module")
async def client(system: System) -> AsyncIterator[Any]:
    url = f"http://127.0.0.1:{system.router.http_port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-any", max_retries=0) as made:
        yield made


def blocks_of(message: Any) -> list[dict[str, Any]]:
    """Return what the blocks say."""
    names = ("type", "text", "name", "input", "thinking", "signature")
    return [{name: value for name in names if (value := getattr(block, name, None))} for block in message.content]


@pytest.mark.parametrize("asked", [{}, {"stop_sequences": ["a"]}, FORCED])
async def test_client_reads_the_same_message_from_a_stream(client: Any, asked: dict[str, Any]) -> None:
    whole = await client.messages.create(messages=TURNS, **asked, **OPTIONS)
    async with client.messages.stream(messages=TURNS, **asked, **OPTIONS) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_message()
    assert blocks_of(streamed) == blocks_of(whole)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert {"message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"} <= kinds
    assert whole.id == f"msg_{whole._request_id}"  # noqa: SLF001 - public by its documentation


async def test_client_sends_blocks_of_an_answer_back(client: Any) -> None:
    called = await client.messages.create(messages=TURNS, **FORCED, **OPTIONS)
    use = called.content[-1]
    turns = [
        *TURNS,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "12 degrees"}]},
    ]
    tools = {"tools": [WEATHER], "tool_choice": {"type": "none"}}
    answer = await client.messages.create(messages=turns, **tools, **OPTIONS)
    counted = await client.messages.count_tokens(model="fake", messages=turns, tools=[WEATHER])
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


async def test_client_raises_its_errors(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.name"):
        await client.messages.create(messages=TURNS, tools=[{"name": "a b", "input_schema": {}}], **OPTIONS)
    with pytest.raises(anthropic.NotFoundError, match="other"):
        await client.messages.create(messages=TURNS, **OPTIONS | {"model": "other"})


async def test_client_that_closes_its_stream_frees_everything(system: System, client: Any) -> None:
    async with client.messages.stream(messages=TURNS, **OPTIONS | {"max_tokens": 1000}) as stream:
        async for _event in stream:
            break
    await system.until_idle()
