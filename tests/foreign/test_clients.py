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


Check = Callable[[Any], None]
"""Fails unless a client saw what it should have."""


def assert_fits(values: list[Any], schema: dict[str, Any]) -> None:
    assert values
    for value in values:
        assert jsonschema_rs.is_valid(schema, value), value


def people(found: Any) -> None:
    assert_fits(found if isinstance(found, list) else [found], PERSON)


def places(found: Any) -> None:
    assert_fits(found, PLACE)


def loop(found: Any) -> None:
    """The second prompt has the calls and their results; ids of calls make its answer any noise, or none."""
    assert set(found.get("calls", ["get_weather"])) == {"get_weather"}
    if "arguments" in found:
        assert_fits(found["arguments"], PLACE)
    first, second = found["prompts"]
    assert second > first > 0


def text(found: Any) -> None:
    assert found["text"]
    assert found.get("same", True)
    assert found.get("chunks", 2) > 1


def two_vectors(found: Any) -> None:
    one, two = found
    assert one == two > 0


def positive(found: Any) -> None:
    assert found > 0


def parsed_tool(found: Any) -> None:
    name, arguments = found
    assert name == "GetWeather"
    assert_fits([arguments], PERSON)


def stream_helper(found: Any) -> None:
    assert_fits(found["calls"], PERSON)
    assert found["done"] == len(found["calls"]) <= found["deltas"]


def person_and_text(found: Any) -> None:
    people(found["person"])
    text(found)


def streamed_loop(found: Any) -> None:
    assert {call["name"] for call in found["calls"]} == {"get_weather"}
    assert_fits([call["input"] for call in found["calls"]], PERSON)
    assert found["kinds"]["tool-result"] == len(found["calls"])
    assert found["kinds"]["tool-input-delta"] > len(found["calls"]), "arguments are streamed"
    loop({"prompts": found["prompts"]})


def parts_of_a_call(found: Any) -> None:
    assert found["names"] == ["get_weather"]
    assert_fits([found["arguments"]], PERSON)
    (call_id,) = found["ids"]
    assert len(call_id) == 9
    assert set(call_id) <= set(string.ascii_letters + string.digits)
    assert found["deltas"] > 2, "arguments are streamed"


CASES: dict[str, dict[str, Check]] = {
    "openai_sdk.py": {
        "parse": people,
        "beta_parse": people,
        "parsed_tool": parsed_tool,
        "tool_loop": loop,
        "streamed_tools": stream_helper,
        "streamed_parse": people,
        "responses_parse": people,
        "responses_tool_loop": loop,
        "responses_stream": people,
        "embeddings": two_vectors,
    },
    "anthropic_sdk.py": {"tool_loop": loop, "stream": text, "streamed_tools": places, "count_tokens": positive},
    "litellm_sdk.py": {
        "completion": text,
        "streaming": text,
        "text_completion": text,
        "tools": loop,
        "streamed_tools": places,
        "response_format": people,
        "responses": text,
        "embedding": two_vectors,
    },
    "instructor_sdk.py": dict.fromkeys(("json_schema", "tools", "tools_strict", "partial"), people),
    "langchain_sdk.py": {
        "structured_output": people,
        "tools": loop,
        "stream": text,
        "streamed_tools": places,
        "responses": person_and_text,
        "embeddings": two_vectors,
    },
    "vercel_ai.mjs": {"generate_object": people, "stream_text_with_tools": streamed_loop},
    "grpc_js.mjs": {"streamed_tool": parts_of_a_call, "embedding": positive},
}
"""Checks by the client's script and its case, which the function of that name describes."""


@pytest.mark.parametrize(("script", "case"), [(script, case) for script, cases in CASES.items() for case in cases])
async def test_client_does_what_its_users_do_every_day(saw: Saw, script: str, case: str) -> None:
    CASES[script][case](await saw(script, case))
