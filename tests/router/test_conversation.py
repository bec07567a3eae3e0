"""Requests with tools, thoughts and the model's own sampling, as the reader makes jobs of them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.ids import RequestId
from kvrelay.v1 import inference_pb2 as pb
from router.fleet.facts import ModelFacts
from router.http.messages import read_chat_prompt
from router.http.schema import ChatBody
from router.reading.codec import ByteCodec
from router.reading.conversation import MAX_TOOLS_CHARS, ChatFormats
from router.reading.validation import MAX_WHOLE_LOGPROBS, RequestReader
from router.record.record import Job
from router.tenants import ANYBODY
from tests.router.fake_worker import BLOCK_SIZE, FINGERPRINT, MODEL
from tests.router.test_hostile_input import BEGAN_UNIX_S, begun

RECOMMENDED = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.05}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def asked(*, tools: tuple[dict[str, Any], ...] = (), **sampling: Any) -> pb.GenerateRequest:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")], tools=map(json.dumps, tools))
    request = pb.GenerateRequest(chat=chat)
    for name, value in sampling.items():
        setattr(request.sampling, name, value)
    return request


async def read(
    request: pb.GenerateRequest,
    *,
    tools: str = "",
    reasoning: str = "",
    model: ModelFacts = MODEL,
    default_max_tokens: int | None = 8,
) -> Job:
    reader = RequestReader(
        ByteCodec(),
        default_max_tokens=default_max_tokens,
        model_defaults=RECOMMENDED,
        formats=ChatFormats(tools=tools, reasoning=reasoning),
        unix_s=lambda: BEGAN_UNIX_S,
    )
    return await reader.read(request, request_id=RequestId("r"), model=model, tenant=ANYBODY)


async def test_sampling_that_is_left_out_is_the_models_and_is_told() -> None:
    job = await read(asked(top_k=5))
    assert (job.sampling.temperature, job.sampling.top_k, job.sampling.max_tokens) == (0.5, 5, 8)
    assert (job.defaults.temperature, job.defaults.max_tokens) == (0.5, 8)
    assert not job.defaults.HasField("top_k")


async def test_resumed_answer_goes_on_as_its_first_router_told_whatever_this_one_has() -> None:
    told = pb.AnswerFormat(tools="mistral")
    request = asked(tools=(TOOL,), seed=3, max_tokens=7)  # of a router without recommended sampling
    resume = pb.Resume(fingerprint=FINGERPRINT, rendered_unix_s=BEGAN_UNIX_S, samples=begun(97), answer_format=told)
    request.resume.CopyFrom(resume)
    job = await read(request, tools="hermes")
    assert (job.sampling.temperature, job.sampling.repetition_penalty) == (1.0, 1.0)
    assert job.answer_format == told
    assert job.sampling.include_special_tokens
    request.resume.answer_format.tools = "none such"
    with pytest.raises(InvalidRequest, match="is not a format of tool calls"):
        await read(request, tools="hermes")


async def test_beam_search_takes_none_of_the_models_sampling() -> None:
    job = await read(asked(use_beam_search=True, n=2))
    assert job.sampling.repetition_penalty == 1.0


@pytest.mark.parametrize("num_tools", [1, 100])
async def test_tools_of_too_many_characters_are_refused_before_they_are_read(num_tools: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "x" * (MAX_TOOLS_CHARS // num_tools)}}
    with pytest.raises(InvalidRequest, match="at most 262144 are taken") as caught:
        await read(asked(tools=(tool,) * num_tools), tools="hermes")
    assert caught.value.field == "chat.tools"


async def test_forced_tools_of_a_large_agent_are_a_grammar() -> None:
    properties = {f"parameter_{i}": {"type": "string", "description": "d" * 40} for i in range(12)}
    tools = tuple(
        {
            "type": "function",
            "function": {"name": f"tool_{i}", "parameters": {"type": "object", "properties": properties}},
        }
        for i in range(60)
    )
    request = asked(tools=tools)
    request.chat.tool_choice.kind = pb.TOOL_CHOICE_KIND_REQUIRED
    job = await read(request, tools="hermes")
    assert len(job.sampling.structured_outputs) > 65536


@pytest.mark.parametrize(
    ("effort", "variables"), [("none", {"enable_thinking": False}), ("low", {"reasoning_effort": "low"})]
)
def test_effort_is_a_variable_of_the_template(effort: str, variables: dict[str, Any]) -> None:
    body = ChatBody(messages=[{"role": "user", "content": "a"}], reasoning_effort=effort)
    assert json.loads(read_chat_prompt(body).template_variables) == variables


def thinking(**chat: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")], **chat))


async def test_budget_of_a_model_that_does_not_think_is_kept_to() -> None:
    job = await read(thinking(thinking_budget=5))
    assert not job.sampling.structured_outputs


async def test_budget_that_cannot_be_kept_to_is_refused_unless_it_is_soft() -> None:
    job = await read(thinking(thinking_budget=5, soft_thinking_budget=True), reasoning="qwen3")
    assert not job.sampling.structured_outputs
    with pytest.raises(InvalidRequest, match="cannot limit thinking"):
        await read(thinking(thinking_budget=5), reasoning="qwen3")


async def test_answer_that_has_begun_has_no_thoughts_any_more() -> None:
    request = thinking(continue_final_message=True)
    with pytest.raises(InvalidRequest, match="only a message of the assistant's"):
        await read(request)
    request.chat.messages.add(role="assistant", content="So")
    job = await read(request, reasoning="qwen3")
    assert bytes(list(job.prompt_token_ids)).endswith(b"user: hi\nassistant: So")
    assert job.answer_format is not None
    assert not job.answer_format.reasoning
    request.chat.messages[-1].tool_calls.add(name="f")
    with pytest.raises(InvalidRequest, match="without calls"):
        await read(request)


@pytest.mark.parametrize(
    ("num_kept", "prompt"), [(3, b"nt:"), (1000, b"user: hi\nassistant:"), (None, b"user: hi\nassistant:")]
)
async def test_prompt_is_cut_to_its_last_tokens(num_kept: int | None, prompt: bytes) -> None:
    request = thinking()
    if num_kept is not None:
        request.truncate_prompt_tokens = num_kept
    assert bytes(list((await read(request)).prompt_token_ids)) == prompt


@pytest.mark.parametrize(
    ("num_blocks", "sampling", "most"),
    [
        (64, {}, 64 * BLOCK_SIZE - 19),
        (64, {"n": 3}, 64 * BLOCK_SIZE - 19),  # samples that do not fit together wait for one another
        (64, {"n": 3, "use_beam_search": True}, (4 + 60 // 3) * BLOCK_SIZE - 19),
        (1 << 20, {}, 4096 - 19),
    ],
)
async def test_answer_is_as_long_as_the_largest_worker_holds(num_blocks: int, sampling: Any, most: int) -> None:
    model = replace(MODEL, max_decode_blocks=num_blocks, context_length=4096)
    job = await read(asked(max_tokens=32_000, **sampling), model=model)
    assert (len(job.prompt_token_ids), job.sampling.max_tokens) == (19, most)
    assert model.max_model_len == min(4096, num_blocks * BLOCK_SIZE)
    assert bool(model.shortage) == (model.max_model_len < 4096)


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        ({}, 131_072 - 19),
        ({"min_tokens": 300}, 131_072 - 19),
        ({"n": 2, "logprobs": 20}, MAX_WHOLE_LOGPROBS // 42),  # more would be refused where it is not streamed
        ({"max_tokens": 60_000, "logprobs": 20}, 60_000),
    ],
)
async def test_answer_without_a_limit_may_fill_the_context(sampling: Any, most: int) -> None:
    model = replace(MODEL, max_decode_blocks=1 << 20, context_length=131_072)
    job = await read(asked(**sampling), model=model, default_max_tokens=None)
    assert job.sampling.max_tokens == most
    assert job.defaults.max_tokens == (0 if "max_tokens" in sampling else most)  # told, so that it can be resumed


async def test_schema_that_cannot_be_kept_to_is_blamed_on_the_field_that_has_it() -> None:
    schema = {"type": "object", "properties": {"id": {"const": 2**53 + 1}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    request = asked(tools=(tool,))
    request.chat.tool_choice.kind = pb.TOOL_CHOICE_KIND_REQUIRED
    with pytest.raises(InvalidRequest, match="#/properties/id/const: 9007199254740993") as caught:
        await read(request, tools="hermes")
    assert caught.value.field == "chat.tools"
