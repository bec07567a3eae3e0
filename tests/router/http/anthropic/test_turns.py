"""Conversations of Anthropic's API become those of a chat, and what a chat cannot hold is refused by its place."""

import json
from dataclasses import replace
from typing import Any

import pytest

from common.errors import InvalidRequest
from router.http.anthropic.calls import body_field, conversation_of, read_messages_body
from router.http.anthropic.schema import CountTokensBody
from router.http.anthropic.turns import read_turns
from router.http.calls import Call, chat_call, renamed
from router.http.messages import read_chat_prompt
from router.http.schema import ChatBody
from router.http.strict import parse_body

HI: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "now", "input": {"zone": "é"}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1", "content": "12:00"}
TOOL: dict[str, Any] = {"name": "now", "description": "Tell the time.", "input_schema": {"type": "object"}}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "description": "Tell the time.", "parameters": {"type": "object"}},
}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def raw(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 5, "messages": [HI], **fields}).encode()


def chat(**fields: Any) -> Call:
    return chat_call(parse_body(ChatBody, json.dumps({"max_tokens": 5, "messages": [HI], **fields}).encode()))


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_messages_body(raw(**fields))
    assert caught.value.field.split("[")[0] in str(caught.value)
    return caught.value


def test_loop_of_calls_and_results_is_the_chat_of_the_same_turns() -> None:
    answered = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "xyz"},
            text("let me"),
            text("see", citations=None, cache_control={"type": "ephemeral"}),
            CALL,
        ],
    }
    again = {"role": "user", "content": [RESULT, text("so?")]}
    assert read_turns([text("be"), text("brief")], [HI, answered, again]) == [
        {"role": "system", "content": "be\nbrief"},
        HI,
        {
            "role": "assistant",
            "content": "let me\nsee",
            "reasoning": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "é"}'}}],
        },
        {"role": "tool", "content": "12:00", "tool_call_id": "c1", "name": "now"},
        {"role": "user", "content": "so?"},
    ]


@pytest.mark.parametrize("nonce", ["cc_version=2.1; cch=36ee5;", "cc_version=2.1; cch=0aaa9;"])
def test_billing_line_that_differs_with_each_request_is_no_part_of_the_prompt(nonce: str) -> None:
    line = f"x-anthropic-billing-header: {nonce}"
    for system in ([text(line), text("be"), text("brief")], f"{line}\nbe\nbrief"):
        assert read_turns(system, [HI])[0] == {"role": "system", "content": "be\nbrief"}
    assert read_turns([text(line)], [HI]) == [HI]
    assert read_turns("be\n" + line, [HI])[0]["content"].endswith(line)


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (RESULT, "12:00"),
        (RESULT | {"content": [text("a"), text("b")]}, "a\nb"),
        (RESULT | {"content": None, "is_error": False}, ""),
        (RESULT | {"is_error": True}, "Error: 12:00"),
    ],
)
def test_result_of_a_tool_is_text_and_its_failure_a_prefix(block: dict[str, Any], content: str) -> None:
    (turn,) = read_turns("", [{"role": "user", "content": [block]}])
    assert (turn["role"], turn["content"], turn["name"]) == ("tool", content, None)


def test_text_before_a_result_stays_before_it() -> None:
    turns = read_turns(None, [{"role": "user", "content": [text("a"), RESULT, text("b"), text("c")]}])
    assert [turn["content"] for turn in turns] == ["a", "12:00", "b\nc"]


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"system": "be brief"}, {"messages": [{"role": "system", "content": "be brief"}, HI]}),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tools": [FUNCTION], "tool_choice": "auto"}),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": [FUNCTION], "tool_choice": "required"}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": [FUNCTION], "tool_choice": "none"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "now", "disable_parallel_tool_use": True}},
            {
                "tools": [FUNCTION],
                "tool_choice": {"type": "function", "function": {"name": "now"}},
                "parallel_tool_calls": False,
            },
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 7}},
            {"thinking_budget": 7, "chat_template_kwargs": {"enable_thinking": True}},
        ),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "enabled"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}),
        ({"context_management": {"edits": []}, "output_config": {"effort": "low"}, "speed": "fast"}, {}),
        ({"top_p": 0}, {"top_p": 0}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop_sequences": []}, {}),
        (
            {"temperature": 1, "top_p": 0.5, "top_k": 3, "seed": -1},
            {"temperature": 1, "top_p": 0.5, "top_k": 3, "seed": -1},
        ),
        (
            {"stream": True, "kvrelay": {"timeout_s": 3, "report": True}},
            {"stream": True, "kvrelay": {"timeout_s": 3, "report": True}},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        ),
        ({"output_format": {"type": "json_schema", "schema": {}}}, {"structured_outputs": {"json": {}}}),
        ({"service_tier": "auto"}, {}),
        ({"metadata": {"user_id": "u"}}, {"prompt_cache_key": "u"}),
        ({"system": None, "tools": None, "container": None}, {}),
    ],
)
def test_call_is_that_of_a_chat_that_asks_for_the_same(given: dict[str, Any], same: dict[str, Any]) -> None:
    call = read_messages_body(raw(**given))
    call.requests[0].chat.soft_thinking_budget = False  # chats have none
    assert replace(call, names={}) == replace(chat(**same), names={})


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, HI]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [HI | {"role": "tool"}]}, "messages[0].role"),
        ({"messages": [HI, {"role": "system", "content": [RESULT]}]}, "messages[1].content[0].type"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (user("hi"), "messages[0].content[0]"),
        (user(text("a"), {"type": "image", "source": {}}), "messages[0].content[1].type"),
        (user({"type": "document"}), "messages[0].content[0].type"),
        (user(CALL), "messages[0].content[0].type"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user(RESULT | {"tool_use_id": ""}), "messages[0].content[0].tool_use_id"),
        (user(RESULT | {"content": [{"type": 1}]}), "messages[0].content[0].content[0]"),
        (user(RESULT | {"is_error": 1}), "messages[0].content[0].is_error"),
        (assistant(RESULT), "messages[0].content[0].type"),
        (assistant(CALL | {"input": "{}"}), "messages[0].content[0].input"),
        (assistant(CALL | {"id": 1}), "messages[0].content[0].id"),
        (assistant({"type": "image"}), "messages[0].content[0].type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": 1}, "system"),
        ({"tools": [{"type": "custom", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "now"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL | {"input_schemas": {}}]}, "tools[1].input_schemas"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "name": "now"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2**32}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}, "output_config.format.x"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "output_format": {"type": "json_schema", "schema": {}},
            },
            "output_format",
        ),
        ({"stop_sequence": ["a"]}, "stop_sequence"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_place(fields: dict[str, Any], field: str) -> None:
    assert refusal(**fields).field == field


def test_long_conversations_and_contents_are_refused() -> None:
    assert refusal(messages=[HI] * 4097).field == "messages"
    assert refusal(messages=[{"role": "user", "content": [text("a")] * 1025}]).field == "messages[0].content"
    many = {"role": "user", "content": [RESULT] * 1000}
    assert refusal(messages=[many] * 5).field == "messages", "results are messages of their own"


def test_counted_conversation_may_end_with_the_assistants_turn() -> None:
    body = parse_body(CountTokensBody, json.dumps({"messages": [{"role": "assistant", "content": "I"}]}).encode())
    assert [each.role for each in read_chat_prompt(conversation_of(body)).messages] == ["assistant"]


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("chat.messages[7].content", "messages"),
        ("prompt", "messages"),
        ("chat.tools[1].function.parameters", "tools[1].input_schema"),
        ("chat.tools[1]", "tools[1]"),
        ("chat.thinking_budget", "thinking"),
        ("chat.tool_choice", "tool_choice"),
        ("sampling.stop", "stop_sequences"),
        ("sampling.stop[2]", "stop_sequences[2]"),
        ("sampling.max_tokens", "max_tokens"),
        ("objective.ttft_s", "kvrelay.ttft_s"),
        ("model", "model"),
    ],
)
def test_fields_of_the_request_have_the_names_of_the_body(field: str, name: str) -> None:
    assert body_field(field, prompt_field="messages") == name


FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"output_config": {"format": FORMAT}}, "output_config.format"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tools"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_blamed_on_its_own_field(asked: dict[str, Any], name: str) -> None:
    field = body_field("sampling.structured_outputs", prompt_field="messages")
    assert renamed(field, read_messages_body(raw(**asked)).names) == name
