"""Anthropic's API in front of real workers: its answers are a chat's, in blocks, and so is what it leaves behind."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import jsonschema_rs
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from router.http.anthropic.answers import SIGNATURE
from tests.e2e.doors import both_doors
from tests.e2e.in_process import Pace, System

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS: Any = [{"role": "user", "content": "What will the weather be?"}]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 150}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "Return the weather.", "input_schema": SCHEMA}
FUNCTION: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Return the weather.", "parameters": SCHEMA},
}
FORCED: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


class Messages:
    """Asks over plain HTTP."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def post(self, path: str = "", **fields: Any) -> Any:
        response = await self._http.post(f"/v1/messages{path}", json={"messages": TURNS, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def ask(self, **fields: Any) -> Any:
        return await self.post(**SAMPLED | fields)

    async def refusal(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the error."""
        response = await self._http.post("/v1/messages", json={"messages": TURNS, **SAMPLED, **fields})
        return response.status_code, response.json()["error"]

    async def events(self, *, pace: Pace | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a stream; the first delta that comes has the engines of `pace` hurry."""
        body = {"messages": TURNS, "stream": True, **SAMPLED, **fields}
        text, found = "", []
        async with self._http.stream("POST", "/v1/messages", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for part in response.aiter_text():
                text += part
                if pace is not None and "content_block_delta" in text:
                    pace.hurry()
        for event in text.removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


def whole(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a stream add up to."""
    first, *events = events
    message: dict[str, Any] = first["message"]
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                kind = delta.pop("type")
                ((name, text),) = delta.items()
                if kind == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + text
                else:
                    block[name] += text
            case "content_block_stop":
                if event["index"] in inputs:
                    message["content"][event["index"]]["input"] = json.loads(inputs[event["index"]])
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    assert events[-1] == {"type": "message_stop"}
    return message


def timeless(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what differs between equal ones: ids, and what has been cached in between."""
    usage = message["usage"]
    counts = (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"])
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content, "usage": counts}


@asynccontextmanager
async def messages_of(system: System) -> AsyncIterator[Messages]:
    url = f"http://127.0.0.1:{system.router.http_port}"
    async with httpx2.AsyncClient(base_url=url, timeout=30) as http:
        yield Messages(http)


@pytest_asyncio.fixture(loop_scope="module")
async def anthropic(system: System) -> AsyncIterator[Messages]:
    async with messages_of(system) as messages:
        yield messages


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 3, "top_p": 0.9}, {"stop_sequences": ["a"]}])
async def test_text_is_that_of_a_chat_streamed_or_not(
    openai: AsyncOpenAI, anthropic: Messages, options: dict[str, Any]
) -> None:
    same = {"stop" if name == "stop_sequences" else name: value for name, value in options.items()}
    messages: Any = [{"role": "system", "content": "Be brief."}, *TURNS]
    reply = await anthropic.ask(system="Be brief.", **options)
    streamed = whole(await anthropic.events(system=[{"type": "text", "text": "Be brief."}], **options))
    top_k: Any = {"extra_body": {"top_k": same.pop("top_k")}} if "top_k" in same else {}
    chat = await openai.chat.completions.create(model="fake", messages=messages, **SAMPLED | same, **top_k)
    assert "".join(block["text"] for block in reply["content"]) == chat.choices[0].message.content
    assert timeless(streamed) == timeless(reply)
    assert chat.usage is not None
    assert timeless(reply)["usage"] == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "fake")
    assert reply["id"].startswith("msg_")


async def test_answer_says_why_it_ended_and_which_stop_sequence_did_it(anthropic: Messages) -> None:
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    reply = await anthropic.ask(**hi)
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("end_turn", None)
    text = reply["content"][0]["text"]
    cut = await anthropic.ask(**hi, max_tokens=2)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    stop = text[3:6]
    stopped = await anthropic.ask(**hi, stop_sequences=["never\0", stop])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == text.partition(stop)[0]
    unstopped = await anthropic.ask(**hi, stop_sequences=["never\0"])
    assert (unstopped["stop_reason"], unstopped["stop_sequence"]) == ("end_turn", None)


async def test_counts_leave_out_what_was_cached_and_a_stream_ends_with_them(anthropic: Messages) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Never asked before"}]}
    counted = await anthropic.post("/count_tokens", **asked)
    first, second = await anthropic.ask(**asked), await anthropic.events(**asked)
    cached = [each["usage"]["cache_read_input_tokens"] for each in (first, second[-2])]
    assert cached[0] < cached[1]
    assert first["usage"]["input_tokens"] == counted["input_tokens"] - cached[0]
    assert second[-2]["usage"]["input_tokens"] == counted["input_tokens"] - cached[1]
    assert second[0]["message"]["usage"]["input_tokens"] == counted["input_tokens"]
    assert first["usage"]["cache_creation_input_tokens"] == 0


async def test_loop_of_calls_and_results_has_the_prompts_of_a_chat(openai: AsyncOpenAI, anthropic: Messages) -> None:
    called = await anthropic.ask(**FORCED)
    asked: Any = {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}
    chat_turns: Any = list(TURNS)
    chat = await openai.chat.completions.create(model="fake", messages=chat_turns, **asked, **SAMPLED)
    assert chat.choices[0].message.tool_calls is not None
    (call,) = chat.choices[0].message.tool_calls
    assert call.type == "function"
    (use,) = called["content"]
    assert (use["type"], use["name"], use["input"]) == (
        "tool_use",
        call.function.name,
        json.loads(call.function.arguments),
    )
    assert jsonschema_rs.is_valid(SCHEMA, use["input"])
    assert called["stop_reason"] == "tool_use"
    arguments = json.dumps(use["input"], ensure_ascii=False)
    told = {"id": use["id"], "type": "function", "function": {"name": use["name"], "arguments": arguments}}
    chat_turns += [
        {"role": "assistant", "content": "", "tool_calls": [told]},
        {"role": "tool", "content": "12 degrees", "tool_call_id": use["id"]},
    ]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "12 degrees"}]}
    turns = [*TURNS, {"role": "assistant", "content": called["content"]}, {"role": "user", "content": [result]}]
    rest: dict[str, Any] = {"messages": turns, "tools": [WEATHER], "tool_choice": {"type": "none"}}
    answer, counted = await anthropic.ask(**rest), await anthropic.post("/count_tokens", **rest)
    same = await openai.chat.completions.create(
        model="fake", messages=chat_turns, tools=[FUNCTION], tool_choice="none", **SAMPLED
    )
    assert [block["text"] for block in answer["content"]] == [same.choices[0].message.content]
    assert same.usage is not None
    assert timeless(answer)["usage"][0] == same.usage.prompt_tokens == counted["input_tokens"]


async def test_streamed_calls_add_up_to_the_whole_answer(system: System, anthropic: Messages) -> None:
    tools: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "any"}}
    reply = await anthropic.ask(**tools, max_tokens=300)
    system.pace.slow_down(at=45)  # just before arguments: a busy router would else send the answer in one message
    events = await anthropic.events(pace=system.pace, **tools, max_tokens=300)
    deltas = [event for event in events if event.get("delta", {}).get("type") == "input_json_delta"]
    assert len(deltas) > len(reply["content"]), "arguments are streamed while they are generated"
    if reply["stop_reason"] == "tool_use":
        assert timeless(whole(events)) == timeless(reply)


async def test_call_that_is_cut_off_shows_what_there_is(anthropic: Messages) -> None:
    events = await anthropic.events(**FORCED, max_tokens=50)
    reply = await anthropic.ask(**FORCED, max_tokens=50)
    text = "".join(event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta")
    assert reply["content"][0]["input"] == {"INVALID_JSON": text}
    assert reply["stop_reason"] == "max_tokens"


async def test_thoughts_are_a_block_before_the_text() -> None:
    asked: dict[str, Any] = {"thinking": {"type": "adaptive"}, "max_tokens": 40}
    wanted = {"type": "json_schema", "schema": {"type": "boolean"}}
    same: Any = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    }
    model = {"reasoning_parser": "qwen3"}
    async with both_doors(model=model) as (system, openai), messages_of(system) as anthropic:
        for seed in range(20):  # about every other answer begins with thoughts
            asked["seed"] = seed
            reply = await anthropic.ask(**asked, output_format=wanted)
            if reply["content"][0]["type"] == "thinking":
                break
        events = await anthropic.events(**asked, output_format=wanted)
        chat = await openai.chat.completions.create(
            model="fake",
            messages=TURNS,
            temperature=1.0,
            seed=asked["seed"],
            max_tokens=40,
            **same,
        )
    thoughts: Any = chat.choices[0].message
    assert reply["content"] == [{"type": "thinking", "thinking": thoughts.reasoning, "signature": SIGNATURE}]
    assert timeless(whole(events)) == timeless(reply)


async def test_structured_answer_is_that_of_a_chat(openai: AsyncOpenAI, anthropic: Messages) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    asked: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    wanted = {"type": "json_schema", "schema": schema}
    reply = await anthropic.ask(output_config={"format": wanted})
    again = await anthropic.ask(output_format=wanted)
    chat = await openai.chat.completions.create(model="fake", messages=TURNS, response_format=asked, **SAMPLED)
    assert reply["content"][0]["text"] == again["content"][0]["text"] == chat.choices[0].message.content


async def test_report_is_beside_the_usage(anthropic: Messages) -> None:
    reply = await anthropic.ask(kvrelay={"report": True})
    events = await anthropic.events(kvrelay={"report": True})
    assert reply["kvrelay"]["requests"][0]["seed"] == events[-2]["kvrelay"]["requests"][0]["seed"] == 3


async def test_schema_that_cannot_be_compiled_is_refused_by_name(anthropic: Messages) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
    status, error = await anthropic.refusal(output_config={"format": wanted})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "output_config.format")
    assert "uniqueItems" in error["message"]
