"""Prompts are those that transformers renders, with tools and variables; templates that fail or escape are refused."""

import json
import time
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from common.chat_template import ChatTemplate, Conversation
from common.errors import InvalidRequest
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


ARGUMENTS_OF_CALLS = {
    "": {},
    "null": {},
    "[1]": {},
    '{"path": "/tm': {},
    "{" + '"a":{' * 2000 + "}" * 2001: {},
    json.dumps('{"path": "/tmp"}'): {"path": "/tmp"},
    '{"text": "line 1\nline 2",}': {"text": "line 1\nline 2"},
    r'{"text": "\ud83d"}': {"text": "\N{REPLACEMENT CHARACTER}"},
}


@pytest.mark.parametrize("arguments", ARGUMENTS_OF_CALLS, ids=range(len(ARGUMENTS_OF_CALLS)))
def test_earlier_calls_reach_the_template_as_objects(arguments: str) -> None:
    function = {"name": "f", "arguments": arguments}
    chat = Conversation(messages=[{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}])
    for source in (
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
        "{# arguments is string #}{{ messages[0].tool_calls[0].function.arguments }}",
    ):
        text = ChatTemplate(source, special_tokens={}).render(chat, rendered_unix_s=NOW_UNIX_S)
        assert json.loads(text.replace(r"\ud83d", "\N{REPLACEMENT CHARACTER}")) == ARGUMENTS_OF_CALLS[arguments]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{{ missing.attribute }}",
        "{{ messages.append(1) }}",
        "{{ ''.encode('nonsense') }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_render_of_a_failing_or_escaping_template_raises_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        ChatTemplate(source, special_tokens={}).render(Conversation.plain([("user", "x")]), rendered_unix_s=NOW_UNIX_S)
    assert raised.value.field == "chat.messages"


def test_render_writes_the_date_that_it_is_given_whatever_the_hosts_time_zone_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}", special_tokens={})
    for zone in ("UTC", "Pacific/Kiritimati", "America/Los_Angeles"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        rendered = template.render(Conversation.plain([("user", "x")]), rendered_unix_s=1_800_000_000)
        assert rendered == "15 Jan 2027 08:00:00.000000", zone
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("source", ["{{ lipsum() }}", "{{ messages | random }}"])
def test_template_that_would_write_something_random_is_refused(source: str) -> None:
    with pytest.raises((InvalidRequest, TemplateError)):
        ChatTemplate(source, special_tokens={}).render(Conversation.plain([("user", "x")]), rendered_unix_s=NOW_UNIX_S)


BEGUN = {"role": "assistant", "content": "The answer is", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    "name", ["Qwen-Qwen2.5-7B-Instruct", "deepseek-ai-DeepSeek-V3.1", "mistralai-Mistral-Nemo-Instruct-2407"]
)
def test_answer_that_has_begun_goes_on_where_transformers_lets_it(name: str) -> None:
    source, messages = (TEMPLATES / f"{name}.jinja").read_text(), [{"role": "user", "content": "Hi"}]
    expected: Any = chat_template_utils.render_jinja_template(
        [[*messages, BEGUN]], chat_template=source, continue_final_message=True, **SPECIAL_TOKENS
    )
    sent = Conversation(messages=messages, begun=BEGUN)
    assert template_of(source).render(sent, rendered_unix_s=NOW_UNIX_S) == expected[0][0]


def test_thoughts_that_the_prompt_opens_end_before_an_answer_that_has_begun() -> None:
    template = template_of("{{ messages[0].content + '<think>\n' }}")
    sent = Conversation(messages=[{"role": "user", "content": "Hi"}], begun=BEGUN)
    assert template.render(sent, rendered_unix_s=0) == "Hi<think>\nhm\n</think>\n\nThe answer is"
    silent = Conversation(messages=sent.messages, begun=BEGUN | {"content": ""})
    assert template.render(silent, rendered_unix_s=0) == "Hi<think>\n"


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def test_system_message_in_the_middle_comes_first_only_where_the_template_wants_it() -> None:
    said = Conversation.plain([("system", "one"), ("user", "a"), ("system", "two"), ("user", "b")])
    anywhere = template_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert anywhere.render(said, rendered_unix_s=0) == "system: one\nuser: a\nsystem: two\nuser: b\n"
    assert template_of(SYSTEM_FIRST).render(said, rendered_unix_s=0) == "system: one\n\ntwo\nuser: a\nuser: b\n"
    with pytest.raises(InvalidRequest, match="never"):
        template_of("{{ raise_exception('never') }}").render(said, rendered_unix_s=0)
