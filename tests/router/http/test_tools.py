"""Tools that run elsewhere are left out, and every form of `tool_choice` says the same at each door."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from kvrelay.v1 import inference_pb2 as pb
from router.http.anthropic.calls import read_messages_body
from router.http.calls import Call
from router.http.generation import read_chat
from router.http.responses.call import read_response
from router.reading.conversation import ChatFormats, read_conversation

USER: dict[str, Any] = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {}}
LONG = "mcp__plugin_enterprise-database_inventory__" + "a" * 85
OTHERS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "ls"}]},
    {"type": "mcp", "server_label": "a", "server_url": "https://localhost"},
    {"type": "local_shell"},
]


def chat(tools: list[Any], **fields: Any) -> Call:
    wrapped = [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        if tool["type"] == "function"
        else tool
        for tool in tools
    ]
    return read_chat(json.dumps({"messages": [USER], "tools": wrapped, **fields}).encode())


def responses(tools: list[Any], **fields: Any) -> Call:
    return read_response(json.dumps({"input": "hi", "tools": tools, **fields}).encode())


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA} | more


def names(call: Call) -> list[str]:
    """Return the functions that the model is told of."""
    return [tool["function"]["name"] for tool in read_conversation(call.requests[0].chat, ChatFormats()).tools]


@pytest.mark.parametrize("read", [chat, responses])
@pytest.mark.parametrize("other", OTHERS, ids=lambda tool: tool["type"])
def test_tool_that_is_no_function_is_left_out_and_told(read: Any, other: dict[str, Any]) -> None:
    call = read([other, function("f"), other])
    assert (names(call), call.left_out) == (["f"], ("tools[0]", "tools[2]"))
    assert "apply_patch" not in call.requests[0].chat.tools[0]


@pytest.mark.parametrize(
    "other",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "a"},
    ],
)
def test_tool_that_anthropic_runs_is_left_out_and_told(other: dict[str, Any]) -> None:
    tools = [other, {"name": LONG, "input_schema": SCHEMA, "defer_loading": True, "input_examples": [{}]}]
    call = read_messages_body(json.dumps({"max_tokens": 1, "messages": [USER], "tools": tools}).encode())
    assert names(call) == [LONG]
    assert set(call.left_out) == {"tools[0]", "tools[1].defer_loading", "tools[1].input_examples"}


def test_place_of_a_bad_tool_counts_those_that_are_left_out() -> None:
    call = chat([OTHERS[0], function("a b")])
    with pytest.raises(InvalidRequest) as caught:
        read_conversation(call.requests[0].chat, ChatFormats())
    assert caught.value.field == "chat.tools[1]"


@pytest.mark.parametrize("read", [chat, responses])
def test_name_of_a_tool_has_up_to_128_characters(read: Any) -> None:
    assert len(LONG) == 128
    assert names(read([function(LONG)])) == [LONG]
    with pytest.raises(InvalidRequest, match="1 to 128"):
        names(read([function(LONG + "a")]))


@pytest.mark.parametrize("read", [chat, responses])
def test_member_of_a_function_that_is_null_counts_as_left_out(read: Any) -> None:
    call = read([{"type": "function", "name": "ping", "description": None, "strict": None, "parameters": None}])
    (tool,) = read_conversation(call.requests[0].chat, ChatFormats()).tools
    assert tool == {"type": "function", "function": {"name": "ping"}}
    (tool,) = read_conversation(
        read([function("f", parameters=SCHEMA | {"required": None})]).requests[0].chat, ChatFormats()
    ).tools
    assert tool["function"]["parameters"] == SCHEMA


NAMED = {"type": "function", "function": {"name": "f"}}
FLAT = {"type": "function", "name": "f"}


@pytest.mark.parametrize("read", [chat, responses])
@pytest.mark.parametrize(
    ("choice", "kind", "told"),
    [
        ("any", pb.TOOL_CHOICE_KIND_REQUIRED, ["f", "g"]),
        ({"type": "auto"}, pb.TOOL_CHOICE_KIND_AUTO, ["f", "g"]),
        ({"type": "none"}, pb.TOOL_CHOICE_KIND_NONE, ["f", "g"]),
        ({"type": "any"}, pb.TOOL_CHOICE_KIND_REQUIRED, ["f", "g"]),
        ({"type": "required"}, pb.TOOL_CHOICE_KIND_REQUIRED, ["f", "g"]),
        (NAMED, pb.TOOL_CHOICE_KIND_NAMED, ["f", "g"]),
        (FLAT, pb.TOOL_CHOICE_KIND_NAMED, ["f", "g"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [FLAT]}, pb.TOOL_CHOICE_KIND_AUTO, ["f"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED, OTHERS[0]]}},
            pb.TOOL_CHOICE_KIND_REQUIRED,
            ["f"],
        ),
    ],
)
def test_choice_of_tools_is_read_in_each_of_its_forms(read: Any, choice: Any, kind: int, told: list[str]) -> None:
    call = read([function("f"), OTHERS[0], function("g")], tool_choice=choice)
    asked = call.requests[0].chat.tool_choice
    assert (asked.kind, names(call)) == (kind, told)
    assert asked.name == ("f" if kind == pb.TOOL_CHOICE_KIND_NAMED else "")


@pytest.mark.parametrize("read", [chat, responses])
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]},
        {"type": "allowed_tools", "mode": "any", "tools": []},
        {"type": "allowed_tools", "mode": "auto", "tools": ["f"]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]},
        {"type": 1},
        "perhaps",
    ],
)
def test_choice_of_what_cannot_be_called_is_refused(read: Any, choice: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read([function("f"), *OTHERS], tool_choice=choice)
    assert caught.value.field == "tool_choice"
