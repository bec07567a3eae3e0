"""`/v1/responses` in front of real workers, by OpenAI's own client: what a chat answers, in items and events."""

import json
from collections.abc import Sequence
from typing import Any, get_args

import jsonschema_rs
import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.e2e.in_process import Pace, System
from tests.e2e.test_tools import ARGUMENTS_AT, CLOCK, OPTIONS, TURNS, WEATHER

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL: Any = {"type": "function", "strict": True, **WEATHER["function"]}
TIME: Any = {"type": "function", **CLOCK["function"]}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "extra_body": {"seed": 3}, "max_output_tokens": 150}
EVENTS: TypeAdapter[Any] = TypeAdapter(get_args(ResponseStreamEvent)[0])


async def events_of(openai: AsyncOpenAI, *, pace: Pace | None = None, **asked: Any) -> list[Any]:
    """Return the events of a stream, each valid in the client's own type and in its place.

    The first delta that comes has the engines of `pace` hurry.
    """
    stream = await openai.responses.create(model="fake", stream=True, **asked)
    events = []
    async for event in stream:
        events.append(event)
        if pace is not None and event.type.endswith(".delta"):
            pace.hurry()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event.to_dict())
    return events


def items_of(events: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the output that the deltas of a stream add up to; every text is told again at its end."""
    texts: dict[int, str] = {}
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        elif event.type.endswith("_text.done"):
            assert event.text == texts.get(event.output_index, "")
        elif event.type.endswith("arguments.done"):
            assert event.arguments == texts.get(event.output_index, "")
        elif event.type == "response.output_item.done":
            items[event.output_index] = event.item.to_dict()
    assert list(items) == list(range(len(items))), "items end in order"
    assert [text_of(item) for item in items.values()] == [texts.get(index, "") for index in items]
    return list(items.values())


def text_of(item: dict[str, Any]) -> str:
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


def bare(items: Sequence[Any]) -> list[Any]:
    """Return items without their ids."""
    dicts = [item if isinstance(item, dict) else item.to_dict() for item in items]
    return [{name: value for name, value in each.items() if name not in ("id", "call_id")} for each in dicts]


async def test_text_is_that_of_the_chat_streamed_or_not(openai: AsyncOpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, *TURNS]
    chat = await openai.chat.completions.create(model="fake", messages=messages, **OPTIONS)
    asked: dict[str, Any] = {"input": TURNS[0]["content"], "instructions": "Be brief.", **SAMPLED}
    whole = await openai.responses.create(model="fake", **asked)
    events = await events_of(openai, **asked)
    assert chat.usage is not None
    assert whole.usage is not None
    Response.model_validate(whole.to_dict())
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert bare(items_of(events)) == bare(whole.output) == bare(events[-1].response.output)
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", whole.status),
    ]


async def test_settings_are_repeated_and_nothing_is_stored(openai: AsyncOpenAI) -> None:
    told: dict[str, Any] = {
        "metadata": {"a": "b"},
        "user": "me",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "max_output_tokens": 2,
        "top_p": 0.5,
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "instructions": "Be brief.",
        "text": {"format": {"type": "json_schema", "name": "v", "schema": {"type": "object"}}, "verbosity": "medium"},
    }
    ignored: dict[str, Any] = {"store": True, "service_tier": "auto", "truncation": "disabled", "background": False}
    answer = await openai.responses.create(model="fake", input="hi", tools=[TIME], **told, **ignored)
    found = answer.to_dict()
    assert {name: found[name] for name in told} == told
    assert (found["store"], found["service_tier"], found["temperature"]) == (False, "default", 1.0)
    assert found["tools"][0]["name"] == "now"


async def test_function_that_is_called_comes_back_and_the_model_sees_the_result(openai: AsyncOpenAI) -> None:
    asked: Any = {"tools": [TOOL], "parallel_tool_calls": False, **SAMPLED}
    first = await openai.responses.create(model="fake", input=TURNS, tool_choice="required", **asked)
    chat_asked: Any = {"tools": [WEATHER], "parallel_tool_calls": False, **OPTIONS}
    chat = await openai.chat.completions.create(model="fake", messages=TURNS, tool_choice="required", **chat_asked)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("get_weather", "completed")
    assert jsonschema_rs.is_valid(TOOL["parameters"], json.loads(call.arguments))
    assert chat.choices[0].message.tool_calls is not None
    (same,) = chat.choices[0].message.tool_calls
    assert same.type == "function"
    assert same.function.arguments == call.arguments

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    turns: Any = [*TURNS, *[item.to_dict() for item in first.output], result]
    second = await openai.responses.create(model="fake", input=turns, tool_choice="none", **asked)
    function = {"name": call.name, "arguments": call.arguments}
    messages: Any = [
        *TURNS,
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    chat = await openai.chat.completions.create(model="fake", messages=messages, tool_choice="none", **chat_asked)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage is not None
    assert chat.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


async def test_streamed_calls_add_up_to_the_whole_answer(system: System, openai: AsyncOpenAI) -> None:
    asked: Any = {"input": TURNS, "tools": [TOOL, TIME], "tool_choice": "required", **SAMPLED}
    whole = await openai.responses.create(model="fake", **asked)
    system.pace.slow_down(at=ARGUMENTS_AT)  # a busy router would else send the whole answer in one message
    events = await events_of(openai, pace=system.pace, **asked)
    asked["tool_choice"] = {"type": "function", "name": "now"}
    named = await openai.responses.create(model="fake", **asked)
    assert bare(items_of(events)) == bare(whole.output) == bare(events[-1].response.output)
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > len(whole.output), "arguments are streamed while they are generated"
    assert len({item.to_dict()["call_id"] for item in whole.output}) == len(whole.output)
    assert {item.to_dict()["name"] for item in named.output} == {"now"}


async def test_logprobs_are_those_of_the_chat(openai: AsyncOpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    asked: Any = {"input": TURNS, "include": include, "top_logprobs": 2, "max_output_tokens": 8, "temperature": 0}
    whole = await openai.responses.create(model="fake", **asked)
    events = await events_of(openai, **asked)
    chat = await openai.chat.completions.create(
        model="fake", messages=TURNS, logprobs=True, top_logprobs=2, max_tokens=8, temperature=0
    )
    assert chat.choices[0].logprobs is not None
    expected = [entry.logprob for entry in chat.choices[0].logprobs.content or ()]
    message: Any = whole.output[0].to_dict()
    told = message["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in told] == expected
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.logprob for event in deltas for entry in event.logprobs] == expected


async def test_effort_none_is_a_variable_of_the_template(openai: AsyncOpenAI) -> None:
    options: Any = {"max_tokens": 4, "temperature": 0}
    chat = await openai.chat.completions.create(
        model="fake", messages=TURNS, extra_body={"chat_template_kwargs": {"enable_thinking": False}}, **options
    )
    answer = await openai.responses.create(
        model="fake", input=TURNS, reasoning={"effort": "none"}, max_output_tokens=4, temperature=0
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "none"


async def test_report_of_the_extension_is_beside_the_usage(openai: AsyncOpenAI) -> None:
    asked: Any = {"input": "hi", "max_output_tokens": 2, "extra_body": {"kvrelay": {"report": True}}}
    whole = await openai.responses.create(model="fake", **asked)
    events = await events_of(openai, **asked)
    for answer in (whole, events[-1].response):
        (request,) = answer.to_dict()["kvrelay"]["requests"]
        assert f"resp_{request['request_id']}" == answer.id


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": "a" * 20_000}, "input"),
        ({"temperature": 11}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [TIME, TIME]}, "tools[1]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}}},
            "text.format",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"extra_body": {"thinking_budget": -5}}, "thinking_budget"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ],
)
async def test_what_the_model_cannot_do_is_refused_by_the_bodys_names(
    openai: AsyncOpenAI, asked: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        await openai.responses.create(**{"model": "fake", "input": "hi"} | asked)
    assert caught.value.param == param
