"""Tools over both doors, in front of real workers: what is called, how it is streamed, and what is refused."""

import json
from typing import Any

import jsonschema_rs
import pytest
from openai import AsyncOpenAI, BadRequestError

from common.errors import InvalidRequest
from kvrelay.client import AsyncClient, ChatMessage, MessageDelta
from tests.e2e.doors import both_doors
from tests.e2e.in_process import System

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
TURNS: Any = [{"role": "user", "content": "What will the weather be?"}]
OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 150}
ARGUMENTS_AT = 45
"""Token shortly before the arguments of a call of `WEATHER`."""
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


async def test_forced_tool_is_called_with_arguments_of_its_schema_over_both_doors(
    openai: AsyncOpenAI, grpc: AsyncClient
) -> None:
    asked: Any = {"tools": [WEATHER, CLOCK], "tool_choice": NAMED}
    reply = await openai.chat.completions.create(model="fake", messages=TURNS, **asked, **OPTIONS)
    expected = await grpc.chat(TURNS, **asked, **OPTIONS)
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert jsonschema_rs.is_valid(WEATHER["function"]["parameters"], json.loads(call.function.arguments))
    assert expected.message is not None
    (same,) = expected.message.tool_calls
    assert (same.name, same.arguments) == (call.function.name, call.function.arguments)


async def test_named_tool_is_called_once_in_every_sample(openai: AsyncOpenAI) -> None:
    asked: Any = {"tools": [WEATHER, CLOCK], "tool_choice": NAMED, "n": 8}
    reply = await openai.chat.completions.create(model="fake", messages=TURNS, **asked, **OPTIONS)
    assert [len(choice.message.tool_calls or ()) for choice in reply.choices] == [1] * 8


async def test_streamed_calls_add_up_to_the_whole_answer(
    system: System, openai: AsyncOpenAI, grpc: AsyncClient
) -> None:
    asked: Any = {"tools": [WEATHER], "tool_choice": "required"}
    whole = await openai.chat.completions.create(model="fake", messages=TURNS, **asked, **OPTIONS)
    system.pace.slow_down(at=ARGUMENTS_AT)  # a busy router would else send the whole answer in one message
    stream = await openai.chat.completions.create(model="fake", messages=TURNS, stream=True, **asked, **OPTIONS)
    chunks = []
    async for chunk in stream:
        chunks.append(chunk.choices[0])
        if any(call.function.arguments for call in chunks[-1].delta.tool_calls or ()):
            system.pace.hurry()
    events = [event async for event in grpc.stream_chat(TURNS, **asked, **OPTIONS)]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
    begun = [delta for delta in deltas if delta.id]
    assert [delta.index for delta in begun] == list(range(len(begun)))
    arguments = ["".join(d.function.arguments for d in deltas if d.index == each.index) for each in begun]
    wanted = whole.choices[0].message.tool_calls
    assert [(each.function.name, text) for each, text in zip(begun, arguments, strict=True)] == [
        (call.function.name, call.function.arguments) for call in wanted
    ]
    assert len(deltas) > len(begun), "arguments are streamed while they are generated"
    assert chunks[-1].finish_reason == whole.choices[0].finish_reason
    told = [call for event in events if isinstance(event, MessageDelta) for call in event.tool_calls]
    assert "".join(call.arguments for call in told if call.index == 0) == arguments[0]


async def test_result_of_a_call_goes_back_as_a_turn_and_the_model_sees_it(
    openai: AsyncOpenAI, grpc: AsyncClient
) -> None:
    asked: Any = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    first = await grpc.chat(TURNS, **asked, **OPTIONS)
    assert first.message is not None
    (call,) = first.message.tool_calls
    result = ChatMessage(role="tool", content="12:00", tool_call_id=call.id)
    turns = [ChatMessage(role="user", content=TURNS[0]["content"]), first.message.turn, result]
    second = await grpc.chat(turns, tools=[CLOCK], tool_choice="none", **OPTIONS)
    function = {"name": call.name, "arguments": call.arguments}
    calls = [{"id": call.id, "type": "function", "function": function}]
    messages: Any = [
        *TURNS,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "12:00", "tool_call_id": call.id},
    ]
    again: Any = {"messages": messages, "tools": [CLOCK], "tool_choice": "none"}
    same = await openai.chat.completions.create(model="fake", **again, **OPTIONS)
    without = await grpc.chat(turns[:1], tools=[CLOCK], tool_choice="none", **OPTIONS)
    assert same.choices[0].message.content == second.text != without.text
    assert same.usage is not None
    assert same.usage.prompt_tokens == second.usage.num_prompt_tokens > without.usage.num_prompt_tokens


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"thinking_budget": -5}}, "thinking_budget"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"tools": [CLOCK], "tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "tool_choice"),
    ],
)
async def test_what_cannot_be_called_is_refused_by_name(openai: AsyncOpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        await openai.chat.completions.create(model="fake", messages=TURNS, **asked)
    assert caught.value.param == param


async def test_model_without_a_markup_for_calls_refuses_tools() -> None:
    async with both_doors(model={"tool_parser": "none"}) as (system, _openai), system.client() as grpc:
        with pytest.raises(InvalidRequest, match="takes no tools"):
            await grpc.chat(TURNS, tools=[CLOCK])


async def test_structure_of_a_model_that_thinks_begins_behind_its_thoughts() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked: Any = {"messages": TURNS, "response_format": wanted, "seed": 4, "max_tokens": 150, "temperature": 1.0}
    async with both_doors(model={"reasoning_parser": "qwen3"}) as (_system, openai):
        choices = (await openai.chat.completions.create(model="fake", n=8, **asked)).choices
        stream = await openai.chat.completions.create(model="fake", n=8, stream=True, **asked)
        deltas = [chunk.choices[0] async for chunk in stream]
    for choice in choices:
        mine = [delta.delta for delta in deltas if delta.index == choice.index]
        content = choice.message.content or ""
        thoughts = getattr(choice.message, "reasoning", None) or ""
        assert "".join(delta.content or "" for delta in mine) == content
        assert "".join(getattr(delta, "reasoning", None) or "" for delta in mine) == thoughts
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(content)["ok"], bool)
    assert any(choice.finish_reason == "stop" for choice in choices)
