"""OpenAI's own client: the helpers that stand on the plain calls."""

from typing import Any

import openai
from cases import ASK, OPTIONS, WEATHER, Person, base_url, run

client = openai.OpenAI(base_url=base_url(), api_key="any", max_retries=0)

RESPONSES: dict[str, Any] = {"model": "fake", "temperature": 1.0, "max_output_tokens": 400}


class GetWeather(Person):
    """Return the weather of a person."""


def parse() -> Any:
    """Chat's `parse` with a pydantic model."""
    reply = client.chat.completions.parse(messages=ASK, response_format=Person, seed=1, **OPTIONS)
    found = reply.choices[0].message.parsed
    assert isinstance(found, Person)
    return found.model_dump()


def beta_parse() -> Any:
    """The older name of the same, several samples."""
    reply = client.beta.chat.completions.parse(messages=ASK, response_format=Person, seed=1, n=2, **OPTIONS)
    assert len(reply.choices) == 2
    return [choice.message.parsed.model_dump() for choice in reply.choices]


def parsed_tool() -> Any:
    """A tool made from a pydantic model, its arguments parsed."""
    reply = client.chat.completions.parse(
        messages=ASK,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=2,
        **OPTIONS,
    )
    (call,) = reply.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    return [call.function.name, call.function.parsed_arguments.model_dump()]


def tool_loop() -> Any:
    """Call, result, answer: the client's own message goes back as it came."""
    asked = {"tools": [WEATHER], "seed": 3, **OPTIONS}
    first = client.chat.completions.create(messages=ASK, tool_choice="required", **asked)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result of {call.function.arguments}"}
        for call in message.tool_calls
    ]
    second = client.chat.completions.create(messages=[*ASK, message, *results], tool_choice="none", **asked)
    return {
        "calls": [call.function.name for call in message.tool_calls],
        "prompts": [first.usage.prompt_tokens, second.usage.prompt_tokens],
    }


def streamed_tools() -> Any:
    """`.stream()` puts calls together and parses them."""
    with client.chat.completions.stream(
        messages=ASK, tools=[openai.pydantic_function_tool(GetWeather)], tool_choice="required", seed=4, **OPTIONS
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    return {
        "done": kinds.count("tool_calls.function.arguments.done"),
        "deltas": kinds.count("tool_calls.function.arguments.delta"),
        "calls": [call.function.parsed_arguments.model_dump() for call in calls],
    }


def streamed_parse() -> Any:
    """`.stream()` with a pydantic model and the usage."""
    with client.chat.completions.stream(
        messages=ASK, response_format=Person, stream_options={"include_usage": True}, seed=5, **OPTIONS
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.usage.completion_tokens > 0
    assert Person.model_validate_json(text) == final.choices[0].message.parsed
    return final.choices[0].message.parsed.model_dump()


def responses_parse() -> Any:
    """`responses.parse` with a pydantic model."""
    reply = client.responses.parse(input=ASK, text_format=Person, extra_body={"seed": 6}, **RESPONSES)
    return reply.output_parsed.model_dump()


def responses_tool_loop() -> Any:
    """Call, result, answer: the items of the output go back as they came."""
    asked = {"tools": [{"type": "function", "strict": True, **WEATHER["function"]}], "extra_body": {"seed": 7}}
    first = client.responses.create(input=ASK, tool_choice="required", **asked, **RESPONSES)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = client.responses.create(input=[*ASK, *first.output, *results], tool_choice="none", **asked, **RESPONSES)
    return {
        "calls": [item.name for item in first.output if item.type == "function_call"],
        "prompts": [first.usage.input_tokens, second.usage.input_tokens],
    }


def responses_stream() -> Any:
    """`responses.stream()` reads every event, and its text is that of the whole response."""
    with client.responses.stream(input=ASK, text_format=Person, extra_body={"seed": 8}, **RESPONSES) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert Person.model_validate_json(text) == final.output_parsed
    return final.output_parsed.model_dump()


def embeddings() -> Any:
    """Vectors of several texts."""
    return [len(item.embedding) for item in client.embeddings.create(model="fake", input=["one", "two"]).data]


if __name__ == "__main__":
    run(
        *(parse, beta_parse, parsed_tool, tool_loop, streamed_tools, streamed_parse),
        *(responses_parse, responses_tool_loop, responses_stream, embeddings),
    )
