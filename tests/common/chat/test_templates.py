"""Prompts are those that transformers renders, for templates of real models, with tools and their variables."""

import json
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from common.chat_template import ChatTemplate, Conversation
from tests.common.chat.templates import TEMPLATES, as_text, as_the_template_wants

NOW_UNIX_S = 1_800_000_000
SPECIAL_TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {"city": "Zürich 'x' <&>", "days": [1, {"a": None}]}
FUNCTION = {
    "name": "get_weather",
    "description": 'Weather <b> & "more" in Zürich',
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]


def called(content: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    calls = [{"id": "abcdefghi", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as clients send it; transformers wants the arguments of calls as objects."""
    if "tool_calls" not in message:
        return message
    function = {"name": "get_weather", "arguments": as_text(ARGUMENTS)}
    return message | {"tool_calls": [call | {"function": function} for call in message["tool_calls"]]}


RESULT = {"role": "tool", "content": "21 °C", "tool_call_id": "abcdefghi"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\na\n</think>\n\nHello"},
        {"role": "user", "content": "Und?"},
    ],
    "called": [{"role": "user", "content": "Weather?"}, called(""), RESULT],
    "called before": [
        {"role": "user", "content": "Weather?"},
        called("Let me see."),
        RESULT,
        {"role": "assistant", "content": "21 °C"},
        {"role": "user", "content": "And now?"},
    ],
}


@cache
def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=SPECIAL_TOKENS)


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"thinking": True}], ids=json.dumps)
def test_prompt_is_the_one_that_transformers_renders(
    name: str,
    conversation: str,
    tools: Any,
    variables: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Frozen":
            return cls.fromtimestamp(NOW_UNIX_S, UTC).replace(tzinfo=tz)

    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)
    source = (TEMPLATES / f"{name}.jinja").read_text()
    messages = CONVERSATIONS[conversation]
    expected: Any = chat_template_utils.render_jinja_template(
        [[as_the_template_wants(each, source) for each in messages]],
        tools=tools,
        chat_template=source,
        add_generation_prompt=True,
        **SPECIAL_TOKENS,
        **variables,
    )
    sent = Conversation(
        messages=[with_arguments_as_text(each) for each in messages], tools=tools or (), variables=variables
    )
    assert template_of(source).render(sent, rendered_unix_s=NOW_UNIX_S) == expected[0][0]
