"""LiteLLM, as the gateways that stand on it call a server: as OpenAI's API and as hosted vLLM."""

import json
from typing import Any

import litellm
from cases import ASK, OPTIONS, WEATHER, Person, base_url, run

SERVER: dict[str, Any] = OPTIONS | {"api_base": base_url(), "api_key": "any", "num_retries": 0}
OPENAI = SERVER | {"model": "openai/fake"}
VLLM = SERVER | {"model": "hosted_vllm/fake"}


def completion() -> Any:
    """A plain chat, by either name of the server."""
    texts = [litellm.completion(messages=ASK, seed=1, **server).choices[0].message.content for server in (OPENAI, VLLM)]
    return {"text": texts[0], "same": texts[0] == texts[1]}


def streaming() -> Any:
    """A streamed chat with the usage is the whole one."""
    asked: Any = {"messages": ASK, "seed": 2, **OPENAI}
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **asked))
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    assert built.usage.completion_tokens == whole.usage.completion_tokens
    assert built.choices[0].message.content == whole.choices[0].message.content
    return {"text": built.choices[0].message.content, "chunks": len(chunks)}


def text_completion() -> Any:
    """A completion of a text."""
    reply = litellm.text_completion(
        model="text-completion-openai/fake", prompt="The sky", max_tokens=8, seed=6, api_base=base_url(), api_key="any"
    )
    return {"text": reply.choices[0].text}


def tools() -> Any:
    """Call, result, answer; LiteLLM's message goes back as it came."""
    asked: Any = {"tools": [WEATHER], "seed": 3, **VLLM}
    calling = litellm.completion(messages=ASK, tool_choice="required", **asked)
    first = calling.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "sunny"}
        for call in first.tool_calls
    ]
    second = litellm.completion(messages=[*ASK, first, *results], tool_choice="none", **asked)
    return {
        "arguments": [json.loads(call.function.arguments) for call in first.tool_calls],
        "prompts": [calling.usage.prompt_tokens, second.usage.prompt_tokens],
    }


def streamed_tools() -> Any:
    """Streamed calls, put together by LiteLLM."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    stream = litellm.completion(messages=ASK, tools=[WEATHER], tool_choice=named, seed=4, stream=True, **OPENAI)
    message = litellm.stream_chunk_builder(list(stream)).choices[0].message
    return [json.loads(call.function.arguments) for call in message.tool_calls]


def response_format() -> Any:
    """A pydantic model as the form of the answer."""
    texts = [
        litellm.completion(messages=ASK, response_format=Person, seed=5, **server).choices[0].message.content
        for server in (OPENAI, VLLM)
    ]
    return [Person.model_validate_json(text).model_dump() for text in texts]


def responses() -> Any:
    """A response, as LiteLLM passes it on."""
    reply = litellm.responses(
        model="openai/fake", input="Who is it?", extra_body={"seed": 7}, api_base=base_url(), api_key="any"
    )
    return {"text": "".join(part.text for item in reply.output if item.type == "message" for part in item.content)}


def embedding() -> Any:
    """Vectors of several texts."""
    reply = litellm.embedding(model="openai/fake", input=["one", "two"], api_base=base_url(), api_key="any")
    return [len(item["embedding"]) for item in reply.data]


if __name__ == "__main__":
    run(completion, streaming, text_completion, tools, streamed_tools, response_format, responses, embedding)
