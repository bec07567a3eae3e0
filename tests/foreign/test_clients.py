"""Widespread clients and frameworks do in front of a router what their users do with them every day.

The fake engine's answers are noise: only grammars give them a form, so every schema bounds its values and every tool is
forced.
"""

import asyncio
import string
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import pytest_asyncio

from engine.executor import Executor
from engine.fake import FakeExecutor
from tests.e2e.in_process import running_system
from tests.foreign.subprocesses import run_node, run_python

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_PROTOS = Path(__file__).parents[2] / "proto"
Saw = Callable[[str, str], Awaitable[Any]]
"""Returns what a client saw in one of its cases."""
_NEEDS: dict[str, tuple[str, ...]] = {
    "openai_sdk.py": ("openai", "pydantic"),
    "anthropic_sdk.py": ("anthropic", "pydantic"),
    "litellm_sdk.py": ("litellm", "pydantic"),
    "instructor_sdk.py": ("instructor", "openai"),
    "langchain_sdk.py": ("langchain_openai", "pydantic"),
    "grpc_js.mjs": ("@grpc/grpc-js", "@grpc/proto-loader"),
    "vercel_ai.mjs": ("ai", "@ai-sdk/openai-compatible", "zod"),
}


def load() -> Executor:
    return FakeExecutor(num_blocks=2048, block_size=16)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def saw() -> AsyncIterator[Saw]:
    """One system for all clients; each client's script runs once, with all of its cases."""
    outcomes: dict[str, asyncio.Task[dict[str, Any]]] = {}
    async with running_system(router={"http_port": 0}, load=load, max_step_tokens=256) as system:
        doors = {"grpc_js.mjs": (system.address, str(_PROTOS))}
        http_door = (f"http://127.0.0.1:{system.router.http_port}/v1",)

        async def look(script: str, case: str) -> Any:
            if script not in outcomes:
                run = run_node if script.endswith(".mjs") else run_python
                outcomes[script] = asyncio.create_task(run(script, *doors.get(script, http_door), needs=_NEEDS[script]))
            outcome = (await outcomes[script])[case]
            assert "error" not in outcome, outcome["error"]
            return outcome["saw"]

        yield look
        await system.until_idle()


def assert_fits(values: list[Any], schema: dict[str, Any]) -> None:
    assert values
    for value in values:
        assert jsonschema_rs.is_valid(schema, value), value


def assert_longer(lengths: list[int]) -> None:
    """The second prompt of a loop has the calls and their results; ids of calls make its answer any noise, or none."""
    first, second = lengths
    assert second > first > 0


@pytest.mark.parametrize("case", ["parse", "streamed_parse"])
async def test_openai_parses_an_answer_into_a_model(saw: Saw, case: str) -> None:
    assert_fits([await saw("openai_sdk.py", case)], PERSON)


async def test_openai_parses_each_of_several_samples(saw: Saw) -> None:
    people = await saw("openai_sdk.py", "beta_parse")
    assert len(people) == 2
    assert_fits(people, PERSON)


async def test_openai_parses_the_arguments_of_a_tool_made_from_a_model(saw: Saw) -> None:
    name, arguments = await saw("openai_sdk.py", "parsed_tool")
    assert name == "GetWeather"
    assert_fits([arguments], PERSON)


async def test_openai_message_with_calls_goes_back_with_their_results(saw: Saw) -> None:
    found = await saw("openai_sdk.py", "tool_loop")
    assert set(found["calls"]) == {"get_weather"}
    assert_longer(found["prompts"])


async def test_openai_stream_helper_puts_calls_together(saw: Saw) -> None:
    found = await saw("openai_sdk.py", "streamed_tools")
    assert_fits(found["calls"], PERSON)
    assert found["done"] == len(found["calls"]) <= found["deltas"]


@pytest.mark.parametrize("case", ["responses_parse", "responses_stream"])
async def test_openai_parses_a_response_into_a_model(saw: Saw, case: str) -> None:
    assert_fits([await saw("openai_sdk.py", case)], PERSON)


async def test_openai_items_of_a_response_go_back_with_results(saw: Saw) -> None:
    found = await saw("openai_sdk.py", "responses_tool_loop")
    assert set(found["calls"]) == {"get_weather"}
    assert_longer(found["prompts"])


@pytest.mark.parametrize(
    ("script", "case"),
    [("openai_sdk.py", "embeddings"), ("litellm_sdk.py", "embedding"), ("langchain_sdk.py", "embeddings")],
)
async def test_client_gets_a_vector_for_each_text(saw: Saw, script: str, case: str) -> None:
    one, two = await saw(script, case)
    assert one == two > 0


async def test_anthropic_calls_tools_and_gives_results_back(saw: Saw) -> None:
    found = await saw("anthropic_sdk.py", "tool_loop")
    assert_fits(found["arguments"], PLACE)
    assert_longer(found["prompts"])


async def test_anthropic_streams(saw: Saw) -> None:
    assert (await saw("anthropic_sdk.py", "stream"))["text"]


async def test_anthropic_puts_streamed_calls_together(saw: Saw) -> None:
    (arguments,) = await saw("anthropic_sdk.py", "streamed_tools")
    assert_fits([arguments], PLACE)


async def test_anthropic_counts_tokens(saw: Saw) -> None:
    assert await saw("anthropic_sdk.py", "count_tokens") > 0


async def test_litellm_passes_a_response_on(saw: Saw) -> None:
    assert (await saw("litellm_sdk.py", "responses"))["text"]


async def test_litellm_gets_the_same_text_from_either_of_its_providers(saw: Saw) -> None:
    found = await saw("litellm_sdk.py", "completion")
    assert found["text"]
    assert found["same"]


async def test_litellm_streams(saw: Saw) -> None:
    found = await saw("litellm_sdk.py", "streaming")
    assert found["text"]
    assert found["chunks"] > 1


async def test_litellm_completes_a_text(saw: Saw) -> None:
    assert (await saw("litellm_sdk.py", "text_completion"))["text"]


async def test_litellm_calls_tools_and_gives_results_back(saw: Saw) -> None:
    found = await saw("litellm_sdk.py", "tools")
    assert_fits(found["arguments"], PLACE)
    assert_longer(found["prompts"])


async def test_litellm_puts_streamed_calls_together(saw: Saw) -> None:
    assert_fits(await saw("litellm_sdk.py", "streamed_tools"), PLACE)


async def test_litellm_asks_for_a_model_as_form_of_the_answer(saw: Saw) -> None:
    assert_fits(await saw("litellm_sdk.py", "response_format"), PERSON)


@pytest.mark.parametrize("mode", ["json_schema", "tools", "tools_strict", "partial"])
async def test_instructor_extracts_an_object(saw: Saw, mode: str) -> None:
    assert_fits([await saw("instructor_sdk.py", mode)], PERSON)


async def test_langchain_answers_with_a_model_by_schema_and_by_tool(saw: Saw) -> None:
    assert_fits(await saw("langchain_sdk.py", "structured_output"), PERSON)


async def test_langchain_calls_tools_and_gives_results_back(saw: Saw) -> None:
    found = await saw("langchain_sdk.py", "tools")
    assert_fits(found["arguments"], PLACE)
    assert_longer(found["prompts"])


async def test_langchain_streams(saw: Saw) -> None:
    found = await saw("langchain_sdk.py", "stream")
    assert found["text"]
    assert found["chunks"] > 1


async def test_langchain_puts_streamed_calls_together(saw: Saw) -> None:
    assert_fits(await saw("langchain_sdk.py", "streamed_tools"), PLACE)


async def test_langchain_answers_over_responses(saw: Saw) -> None:
    found = await saw("langchain_sdk.py", "responses")
    assert_fits([found["person"]], PERSON)
    assert found["text"]


async def test_vercel_ai_generates_an_object(saw: Saw) -> None:
    assert_fits([await saw("vercel_ai.mjs", "generate_object")], PERSON)


async def test_vercel_ai_streams_a_loop_of_tools(saw: Saw) -> None:
    found = await saw("vercel_ai.mjs", "stream_text_with_tools")
    assert {call["name"] for call in found["calls"]} == {"get_weather"}
    assert_fits([call["input"] for call in found["calls"]], PERSON)
    assert found["kinds"]["tool-result"] == len(found["calls"])
    assert found["kinds"]["tool-input-delta"] > len(found["calls"]), "arguments are streamed"
    assert_longer(found["prompts"])


async def test_grpc_of_node_gets_the_parts_of_a_call_without_a_parser(saw: Saw) -> None:
    found = await saw("grpc_js.mjs", "streamed_tool")
    assert found["names"] == ["get_weather"]
    assert_fits([found["arguments"]], PERSON)
    (call_id,) = found["ids"]
    assert len(call_id) == 9
    assert set(call_id) <= set(string.ascii_letters + string.digits)
    assert found["deltas"] > 2, "arguments are streamed"


async def test_grpc_of_node_gets_an_embedding(saw: Saw) -> None:
    assert await saw("grpc_js.mjs", "embedding") > 0
