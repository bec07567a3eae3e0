"""Anthropic's own client against `/v1/messages`."""

from typing import Any

import anthropic
from cases import ASK, WEATHER, base_url, run

client = anthropic.Anthropic(base_url=base_url().removesuffix("/v1"), api_key="any", max_retries=0)
OPTIONS: dict[str, Any] = {"model": "fake", "max_tokens": 400}
TOOL: Any = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}


def tool_loop() -> Any:
    """Call, result, answer: the client's own blocks go back as they came."""
    asked = {"tools": [TOOL], **OPTIONS}
    first = client.messages.create(messages=ASK, tool_choice={"type": "any"}, extra_body={"seed": 1}, **asked)
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
    turns = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = client.messages.create(messages=turns, tool_choice={"type": "none"}, extra_body={"seed": 2}, **asked)
    prompts = [each.usage.input_tokens + each.usage.cache_read_input_tokens for each in (first, second)]
    return {"arguments": [call.input for call in calls], "prompts": prompts}


def stream() -> Any:
    """The text of a stream is that of its last message."""
    with client.messages.stream(messages=ASK, extra_body={"seed": 3}, **OPTIONS) as events:
        text = "".join(events.text_stream)
        assert text == events.get_final_text()
    return {"text": text}


def streamed_tools() -> Any:
    """Input of calls, put together by the client."""
    named: Any = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(
        messages=ASK, tools=[TOOL], tool_choice=named, extra_body={"seed": 4}, **OPTIONS
    ) as events:
        message = events.get_final_message()
    return [block.input for block in message.content if block.type == "tool_use"]


def count_tokens() -> Any:
    """The length of a prompt."""
    return client.messages.count_tokens(model="fake", messages=ASK, tools=[TOOL]).input_tokens


if __name__ == "__main__":
    run(tool_loop, stream, streamed_tools, count_tokens)
