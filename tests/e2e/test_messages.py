"""Anthropic's API in front of real workers: its answers are a chat's, in blocks, and so is what it leaves behind."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import jsonschema_rs
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.e2e.in_process import Pace, System
from tests.e2e.test_tools import ARGUMENTS_AT, OPTIONS, TURNS, WEATHER

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA: dict[str, Any] = WEATHER["function"]["parameters"]
TOOL: dict[str, Any] = {"name": "get_weather", "description": "Return the weather.", "input_schema": SCHEMA}
FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


class Messages:
    """Asks over plain HTTP."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def post(self, path: str = "", **fields: Any) -> Any:
        response = await self._http.post(f"/v1/messages{path}", json={"messages": TURNS, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def ask(self, **fields: Any) -> Any:
        return await self.post(**OPTIONS | fields)

    async def events(self, *, pace: Pace | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a stream; the first delta that comes has the engines of `pace` hurry."""
        body = {"messages": TURNS, "stream": True, **OPTIONS, **fields}
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


@pytest_asyncio.fixture(loop_scope="module")
async def anthropic(system: System) -> AsyncIterator[Messages]:
    url = f"http://127.0.0.1:{system.router.http_port}"
    async with httpx2.AsyncClient(base_url=url, timeout=30) as http:
        yield Messages(http)


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 3, "top_p": 0.9}, {"stop_sequences": ["a"]}])
async def test_text_is_that_of_a_chat_streamed_or_not(
    openai: AsyncOpenAI, anthropic: Messages, options: dict[str, Any]
) -> None:
    same = {"stop" if name == "stop_sequences" else name: value for name, value in options.items()}
    messages: Any = [{"role": "system", "content": "Be brief."}, *TURNS]
    reply = await anthropic.ask(system="Be brief.", **options)
    streamed = whole(await anthropic.events(system=[{"type": "text", "text": "Be brief."}], **options))
    top_k: Any = {"extra_body": {"top_k": same.pop("top_k")}} if "top_k" in same else {}
    chat = await openai.chat.completions.create(model="fake", messages=messages, **OPTIONS | same, **top_k)
    assert "".join(block["text"] for block in reply["content"]) == chat.choices[0].message.content
    assert timeless(streamed) == timeless(reply)
    assert chat.usage is not None
    assert timeless(reply)["usage"] == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "fake")
    assert reply["id"].startswith("msg_")


async def test_counts_leave_out_what_was_cached_and_a_stream_ends_with_them(anthropic: Messages) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Never asked before"}]}
    counted = await anthropic.post("/count_tokens", **asked)
    first, second = await anthropic.ask(**asked), await anthropic.events(**asked)
    cached = [each["usage"]["cache_read_input_tokens"] for each in (first, second[-2])]
    assert cached[0] < cached[1]
    assert first["usage"]["input_tokens"] == counted["input_tokens"] - cached[0]
    assert second[-2]["usage"]["input_tokens"] == counted["input_tokens"] - cached[1]
    begun = second[0]["message"]["usage"]
    assert begun["input_tokens"] + begun["cache_read_input_tokens"] == counted["input_tokens"]
    assert first["usage"]["cache_creation_input_tokens"] == 0


async def test_loop_of_calls_and_results_has_the_prompts_of_a_chat(openai: AsyncOpenAI, anthropic: Messages) -> None:
    called = await anthropic.ask(**FORCED)
    asked: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    chat_turns: Any = list(TURNS)
    chat = await openai.chat.completions.create(model="fake", messages=chat_turns, **asked, **OPTIONS)
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
    rest: dict[str, Any] = {"messages": turns, "tools": [TOOL], "tool_choice": {"type": "none"}}
    answer, counted = await anthropic.ask(**rest), await anthropic.post("/count_tokens", **rest)
    same = await openai.chat.completions.create(
        model="fake", messages=chat_turns, tools=[WEATHER], tool_choice="none", **OPTIONS
    )
    # The id in the prompt is another one each time, and so is the answer, which may be empty.
    assert "".join(block["text"] for block in answer["content"]) == same.choices[0].message.content
    assert same.usage is not None
    assert timeless(answer)["usage"][0] == same.usage.prompt_tokens == counted["input_tokens"]


async def test_streamed_calls_add_up_to_the_whole_answer(system: System, anthropic: Messages) -> None:
    tools: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    reply = await anthropic.ask(**tools, max_tokens=300)
    system.pace.slow_down(at=ARGUMENTS_AT)  # a busy router would else send the answer in one message
    events = await anthropic.events(pace=system.pace, **tools, max_tokens=300)
    deltas = [event for event in events if event.get("delta", {}).get("type") == "input_json_delta"]
    assert len(deltas) > len(reply["content"]), "arguments are streamed while they are generated"
    if reply["stop_reason"] == "tool_use":
        assert timeless(whole(events)) == timeless(reply)


async def test_report_is_beside_the_usage(anthropic: Messages) -> None:
    reply = await anthropic.ask(kvrelay={"report": True})
    events = await anthropic.events(kvrelay={"report": True})
    assert reply["kvrelay"]["requests"][0]["seed"] == events[-2]["kvrelay"]["requests"][0]["seed"] == 3
