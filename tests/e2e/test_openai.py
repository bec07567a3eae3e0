"""The HTTP door in front of real workers: its answers are those of gRPC, and so is what it leaves behind."""

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from kvrelay.client import AsyncClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Tell me about rivers. "
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 24, "top_p": 0.9}


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, SAMPLED | {"stop": ["e"]}, SAMPLED | {"presence_penalty": 1.5}])
async def test_text_of_both_doors_is_equal_streamed_or_not(
    openai: AsyncOpenAI, grpc: AsyncClient, options: dict[str, Any]
) -> None:
    expected = await grpc.generate(PROMPT, **options)
    whole = await openai.completions.create(model="fake", prompt=PROMPT, **options)
    stream = await openai.completions.create(model="fake", prompt=PROMPT, stream=True, **options)
    parts = [chunk.choices[0] async for chunk in stream]
    assert whole.choices[0].text == "".join(part.text for part in parts) == expected.text
    assert whole.choices[0].finish_reason == parts[-1].finish_reason == expected.samples[0].finish_reason
    assert expected.text


@pytest.mark.parametrize("way", ["response_format", "structured_outputs", "guided_json"])
async def test_structured_answer_of_both_doors_is_equal_and_valid(
    openai: AsyncOpenAI, grpc: AsyncClient, way: str
) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    ways: dict[str, dict[str, Any]] = {
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        "structured_outputs": {"extra_body": {"structured_outputs": {"json": schema}}},
        "guided_json": {"extra_body": {"guided_json": schema}},
    }
    messages: Any = [{"role": "user", "content": "Is it?"}]
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 200}
    expected = await grpc.chat(messages, structured_outputs={"json": schema}, **options)
    reply = await openai.chat.completions.create(model="fake", messages=messages, **ways[way], **options)
    assert reply.choices[0].message.content == expected.text
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(expected.text)["ok"], bool)


async def test_schema_that_cannot_be_compiled_is_a_bad_request_that_names_the_keyword(openai: AsyncOpenAI) -> None:
    schema = {"type": "array", "uniqueItems": True}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(BadRequestError, match="uniqueItems"):
        await openai.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "a"}], response_format=wanted
        )


async def test_chat_of_both_doors_is_equal(openai: AsyncOpenAI, grpc: AsyncClient) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
    expected = await grpc.chat(messages, n=3, **SAMPLED)
    reply = await openai.chat.completions.create(model="fake", messages=messages, n=3, **SAMPLED)
    assert [choice.message.content for choice in reply.choices] == [each.text for each in expected.samples]


async def test_completion_logprobs_and_echo_are_those_of_grpc(openai: AsyncOpenAI, grpc: AsyncClient) -> None:
    expected = await grpc.generate(PROMPT, logprobs=2, prompt_logprobs=2, **GREEDY)
    reply = await openai.completions.create(model="fake", prompt=PROMPT, logprobs=2, echo=True, **GREEDY)
    (choice,) = reply.choices
    assert choice.text == PROMPT + expected.text
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.text_offset is not None
    assert told.top_logprobs is not None
    assert "".join(told.tokens[: len(PROMPT)]) == PROMPT
    assert told.token_logprobs[0] is None
    assert expected.prompt_logprobs is not None
    assert expected.samples[0].logprobs is not None
    positions = [*expected.prompt_logprobs[1:], *expected.samples[0].logprobs]
    assert told.token_logprobs[1:] == [position.chosen.logprob for position in positions]
    assert told.text_offset[: len(PROMPT) + 1] == list(range(len(PROMPT) + 1))
    assert all(len(top) >= 2 for top in told.top_logprobs[1:])


async def test_echo_of_no_tokens_tells_the_prompt_and_its_logprobs(openai: AsyncOpenAI, grpc: AsyncClient) -> None:
    expected = await grpc.generate(PROMPT, prompt_logprobs=1, max_tokens=1)
    asked: Any = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = await openai.completions.create(model="fake", **asked)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert expected.prompt_logprobs is not None
    positions = expected.prompt_logprobs[1:]
    assert choice.logprobs.token_logprobs[1:] == [position.chosen.logprob for position in positions]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(PROMPT), 0)


async def test_best_of_answers_the_samples_that_are_most_probable_in_the_mean(
    openai: AsyncOpenAI, grpc: AsyncClient
) -> None:
    all_samples = (await grpc.generate(PROMPT, n=5, logprobs=0, **SAMPLED)).samples
    asked: Any = {"prompt": [PROMPT, PROMPT], "best_of": 5, "n": 2, **SAMPLED}
    reply = await openai.completions.create(model="fake", **asked)

    def mean(sample: Any) -> float:
        return float(sum(each.chosen.logprob for each in sample.logprobs) / len(sample.logprobs))

    best = [sample.text for sample in sorted(all_samples, key=mean, reverse=True)[:2]]
    assert [choice.text for choice in reply.choices] == best * 2
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in reply.choices)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 2 * sum(len(sample.token_ids) for sample in all_samples)


async def test_chat_logprobs_tell_each_token_and_the_most_probable(openai: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"model": "fake", "messages": messages, "logprobs": True, "top_logprobs": 3, **GREEDY}
    whole = (await openai.chat.completions.create(**options)).choices[0].logprobs
    stream = await openai.chat.completions.create(stream=True, **options)
    entries = [entry async for chunk in stream for entry in _content(chunk.choices[0].logprobs)]
    assert [entry.logprob for entry in _content(whole)] == [entry.logprob for entry in entries]
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.bytes is None or bytes(entry.bytes).decode() == entry.token for entry in entries)


def _content(logprobs: Any) -> list[Any]:
    return list(logprobs.content) if logprobs is not None else []


async def test_second_turn_reports_its_cached_tokens(openai: AsyncOpenAI) -> None:
    prompt = [i % 256 for i in range(100)]
    for expected in (0, 96):
        stream = await openai.completions.create(
            model="fake",
            prompt=prompt,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        *_parts, last = [chunk async for chunk in stream]
        assert last.usage is not None
        assert last.usage.prompt_tokens_details is not None
        assert last.usage.prompt_tokens_details.cached_tokens == expected
