"""Requests with tools, thoughts and the model's own sampling, as the reader makes jobs of them."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.ids import RequestId
from kvrelay.v1 import inference_pb2 as pb
from router.codec import ByteCodec
from router.conversation import MAX_TOOLS_CHARS, ChatFormats
from router.http.messages import read_chat_prompt
from router.http.schema import ChatBody
from router.record import Job
from router.tenants import ANYBODY
from router.validation import RequestReader
from tests.router.fake_worker import FINGERPRINT, MODEL
from tests.router.test_hostile_input import BEGAN_UNIX_S, begun

RECOMMENDED = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.05}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def asked(*, tools: tuple[dict[str, Any], ...] = (), **sampling: Any) -> pb.GenerateRequest:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")], tools=map(json.dumps, tools))
    request = pb.GenerateRequest(chat=chat)
    for name, value in sampling.items():
        setattr(request.sampling, name, value)
    return request


async def read(request: pb.GenerateRequest, *, tools: str = "") -> Job:
    reader = RequestReader(
        ByteCodec(),
        default_max_tokens=8,
        model_defaults=RECOMMENDED,
        formats=ChatFormats(tools=tools),
        unix_s=lambda: BEGAN_UNIX_S,
    )
    return await reader.read(request, request_id=RequestId("r"), model=MODEL, tenant=ANYBODY)


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
