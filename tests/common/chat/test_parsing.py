"""Answers become content, reasoning and tool calls, whatever the model writes and however it arrives."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat.deltas import ParsedDelta, ToolCallDelta
from common.chat.formats import MARKERS, TOOL_FORMATS
from common.chat.json_reader import MAX_DEPTH
from common.chat.parsing import MessageParser
from tests.common.chat.dialects import ANSWERS, CALLED, TYPES
from tests.common.chat.parsed import MARKS, parse, split

ARGUMENTS = (
    '{"city": "Zürich {\\"8001\\"}", "days": [1, {"a": null}], "note": "</tool_call> 雪 \\u00e9\\n", "t": -1.5e3}'
)
DEEPSEEK_FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK_PLAIN = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"


def deepseek(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>"


EXAMPLES = {
    "hermes": [
        f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g.h-1", "arguments": {}}\n</tool_call>',
        f'<tool_call>{{"arguments":{ARGUMENTS},"name":"f"}}</tool_call>'
        '<tool_call>{ "type": "function", "name" : "g.h-1" , "arguments" : {} }</tool_call>',
        f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n<tool_call>\n{{"name": "g.h-1", "arguments": {{}}}}',
    ],
    "llama3_json": [
        f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS}}}; {{"name": "g.h-1", "parameters": {{}}}}',
        f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {ARGUMENTS}}}\n'
        '{"name": "g.h-1", "arguments": {}}',
    ],
    "mistral": [
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g.h-1", "arguments": {{}}}}]',
        f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}, "id": "abcdefghi"}},'
        '{"arguments":{},"name":"g.h-1","id":"123456789"}]',
        f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g.h-1[ARGS]{{}}",
        f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}[TOOL_CALLS]g.h-1{{}}",
    ],
    "deepseek_v3": [
        deepseek(DEEPSEEK_FENCED.format("f", ARGUMENTS), DEEPSEEK_FENCED.format("g.h-1", "{}")),
    ],
    "deepseek_v31": [
        deepseek(DEEPSEEK_PLAIN.format("f", ARGUMENTS), DEEPSEEK_PLAIN.format("g.h-1", "{}")),
    ],
}


@pytest.mark.parametrize(("tools", "markup"), [(name, each) for name in EXAMPLES for each in EXAMPLES[name]])
@pytest.mark.parametrize("before", ["", "Let me see:\n\n"])
def test_calls_keep_their_arguments_byte_for_byte(tools: str, markup: str, before: str) -> None:
    for pieces in ([before, markup, "\n"], list(f"{before}{markup}\n")):
        message = parse(pieces, tools=tools)
        assert (message.content, message.calls) == (before.rstrip(), [("f", ARGUMENTS), ("g.h-1", "{}")])


PYTHONIC = (
    r"""[f(city='Z"ü\'', days=[1, {'a': None,}, ], ok=True, ko=false, t=-.5e3, n=1., s="\x41\u00e9\n\q"), g.h-1( )]"""
)
PYTHONIC_ARGUMENTS = {
    "city": "Z\"ü'",
    "days": [1, {"a": None}],
    "ok": True,
    "ko": False,
    "t": -500.0,
    "n": 1.0,
    "s": "Aé\n\\q",
}


@pytest.mark.parametrize("markup", [PYTHONIC, f" {PYTHONIC}", f"Hm.\n<|python_start|>{PYTHONIC}<|python_end|>"])
def test_python_calls_become_json(markup: str) -> None:
    for pieces in ([markup], list(markup)):
        message = parse(pieces, tools="pythonic")
        assert message.content == ("Hm." if "Hm." in markup else "")
        (name, arguments), second = message.calls
        assert (name, json.loads(arguments), second) == ("f", PYTHONIC_ARGUMENTS, ("g.h-1", "{}"))


def test_python_calls_that_failed_leave_nothing_to_later_ones() -> None:
    message = parse(["[f(a=No)] <|python_start|>[g()]<|python_end|>"], tools="pythonic")
    assert (message.content, message.calls) == ("[f(a=No)]", [("g", "{}")])


def test_llama_calls_may_begin_the_answer_without_a_marker() -> None:
    message = parse(['\n{"name": "f", "parameters": {"a": 1}}'], tools="llama3_json")
    assert (message.content, message.calls) == ("", [("f", '{"a": 1}')])
    later = 'So: {"name": "f", "parameters": {"a": 1}}'
    assert parse([later], tools="llama3_json").content == later


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {"a": tru}, "name": "f"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {"a": 01}, "name": "f"}\n</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "{"n" * 129}", "arguments": {{}}}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f g", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>\n{}\n</tool_call>"),
        ("hermes", "<tool_call>"),
        ("hermes", 'a < b, <tool_calls>, </tool_call> <tool_call>\n{"nam'),
        ("llama3_json", '{"name": "Ada", "age": 36}'),
        ("llama3_json", '{"result": {"name": "f", "parameters": {}}}'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS]f[ARGS]3"),
        ("mistral", "See [1], [TOOL_BOX] and [TOOL_CALLS"),
        ("pythonic", "[see(1)] for more"),
        ("pythonic", "[link](http://a.b/c)"),
        ("pythonic", "[f(a==1)]"),
        ("pythonic", "[f(a=No)]"),
        ("pythonic", "[f(a=1_000)]"),
        ("pythonic", "[f(a="),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```yaml\na: 1\n```"),
    ],
)
def test_text_that_is_no_call_comes_out_as_content_in_full(tools: str, text: str) -> None:
    for pieces in ([f"{text}  "], list(f"{text}  ")):
        message = parse(pieces, tools=tools)
        assert (message.content, message.calls) == (f"{text}  ", [])


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": "tru', "", '{"a": "tru'),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}', "", '{"a": 1}'),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_c', "\n</tool_c", '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone. ', "\n\nDone. ", "{}"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, b}}</tool_call> Done.', " Done.", '{"a": 1, b}}'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1 2}}<tool_call>', "<tool_call>", '{"a": 1 2}}'),
    ],
)
def test_call_that_has_begun_stays_one_and_keeps_its_text(text: str, content: str, arguments: str) -> None:
    for pieces in ([text], list(text)):
        message = parse(pieces, tools="hermes")
        assert (message.content, message.calls) == (content, [("f", arguments)])


MENDED = {
    '{"a": "line 1\nline 2\ttab"}': '{"a": "line 1\\nline 2\\ttab"}',
    r"""{"a": "it\'s \d \u12 \x41 C:\tmp"}""": r"""{"a": "it's \\d \\u12 \\x41 C:\tmp"}""",
    '{"a": [1, 2 , ], "b": {"c": 1,},\n}': '{"a": [1, 2  ], "b": {"c": 1}\n}',
    '{\'a\': \'say "hi"\', "b": True, \'c\': None, "d": .5, "e": NaN}': (
        '{"a": "say \\"hi\\"", "b": true, "c": null, "d": 0.5, "e": null}'
    ),
    '"{\\"a\\": \\"x\\"}"': '{"a": "x"}',
    r'"\"{\\\"a\\\": 1}\""': '{"a": 1}',
    '""': "{}",
    "null": "{}",
}


@pytest.mark.parametrize("given", MENDED)
@pytest.mark.parametrize(
    ("tools", "markup"),
    [
        ("hermes", '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{{"arguments": {}, "name": "f",}}}}\n</tool_call>'),
        ("llama3_json", '<|python_tag|>{{"name": "f", "parameters": {}}}'),
        ("mistral", '[TOOL_CALLS] [{{"name": "f", "arguments": {}}}]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}"),
        ("deepseek_v31", deepseek(DEEPSEEK_PLAIN.replace("{}", "f", 1))),
    ],
)
def test_calls_that_are_nearly_json_come_out_as_json(tools: str, markup: str, given: str) -> None:
    for pieces in ([markup.format(given)], list(markup.format(given))):
        message = parse(pieces, tools=tools)
        assert (message.content, message.calls) == ("", [("f", MENDED[given])])
        assert isinstance(json.loads(MENDED[given]), dict)


def test_calls_without_their_last_brackets_are_whole() -> None:
    for text in ('{"name": "f", "arguments": {"a": [1, {"b": 2}\n', '{"name": "f", "arguments": {"a": [1, {"b": 2}]}'):
        message = parse(list(f"<tool_call>{text}</tool_call>"), tools="hermes")
        assert (message.content, message.calls) == ("", [("f", '{"a": [1, {"b": 2}]}')])


@pytest.mark.parametrize(
    ("text", "is_finished"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "\n",}}</tool_call>', True),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, b}}</tool_call>', False),
        ('<tool_call>{"name": "f", "arguments": {"a": "tru', False),
        ('<tool_call>{"name": "f", "arguments": {b}}<tool_call>{"name": "f", "arguments": {}}</tool_call>', False),
        ("No call.", False),
    ],
)
def test_only_calls_whose_arguments_are_whole_end_an_answer(text: str, is_finished: bool) -> None:
    parser = MessageParser(tools="hermes", reasoning=None)
    parser.push(text, is_last=True)
    assert parser.ends_in_calls == is_finished


def test_arguments_and_text_stream_as_soon_as_they_are_certain() -> None:
    parser = MessageParser(tools="hermes", reasoning="qwen3")
    assert parser.push("<think>a <b").reasoning == "a <b"
    assert parser.push(" </thin") == ParsedDelta(reasoning=" ")
    assert parser.push("k>\n").reasoning == ""
    assert parser.push("\nOne <").content == "One"
    assert parser.push("two ").content == " <two"
    assert parser.push('<tool_call>\n{"name": "f", "argu') == ParsedDelta()
    assert parser.push('ments": {"a": "b').tool_calls == (ToolCallDelta(index=0, name="f", arguments='{"a": "b'),)
    assert parser.push('c"').tool_calls == (ToolCallDelta(index=0, name=None, arguments='c"'),)
    assert parser.push("}}\n</tool_call>").tool_calls == (ToolCallDelta(index=0, name=None, arguments="}"),)
    assert parser.finish() == ParsedDelta()


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("text", "in_reasoning", "thought", "content"),
    [
        ("<think>\nHm. </thin\n</think>\n\nYes.\n", False, "\nHm. </thin\n", "Yes.\n"),
        ("Hm.</think>\nYes.", True, "Hm.", "Yes."),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        (" \n<think>Hm.", False, "Hm.", ""),
        ("Hm. </thi", True, "Hm. </thi", ""),
        ("\nYes, <think>.", False, "", "\nYes, <think>."),
        (" <thin", False, "", " <thin"),
        ("<think></think><think>a</think>", False, "", "<think>a</think>"),
    ],
)
def test_thinking_is_split_from_the_content(
    reasoning: str, text: str, in_reasoning: bool, thought: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        message = parse(pieces, reasoning=reasoning, in_reasoning=in_reasoning)
        assert (message.reasoning, message.content) == (thought, content)


def test_markers_within_thinking_are_thought() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = parse([f"{call}</think>\n\n{call}"], tools="hermes", reasoning="qwen3", in_reasoning=True)
    assert (message.reasoning, message.content, message.calls) == (call, "", [("f", "{}")])


def test_bare_arguments_of_a_forced_tool_are_its_call() -> None:
    for options in ({}, {"reasoning": "qwen3"}):
        message = parse(list(' {"a": [1]}\n'), forced_name="f", **options)
        assert (message.content, message.calls) == ("", [("f", '{"a": [1]}')])
    assert parse(["I cannot."], forced_name="f").content == "I cannot."
    named = parse(['<tool_call>{"name": "f", "arguments": {}}</tool_call>'], tools="hermes", forced_name="f")
    assert named.calls == [("f", "{}")]


def test_without_formats_text_passes_unchanged() -> None:
    text = " <think> <tool_call>\n[TOOL_CALLS] "
    assert parse(list(text)).content == text


def test_deep_arguments_end_the_call() -> None:
    for num_levels, is_call in ((MAX_DEPTH - 1, True), (MAX_DEPTH, False)):
        arguments = '{"a": ' + "[" * num_levels + "]" * num_levels + "}"
        message = parse([f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>'], tools="hermes")
        assert bool(message.calls) == is_call
        python = MessageParser(tools="pythonic", reasoning=None)
        python.push(f"[f(a={arguments[6:-1]})]", is_last=True)
        assert python.ends_in_calls == is_call


@pytest.mark.parametrize("tools", MARKS)
@pytest.mark.timeout(30)
def test_hostile_text_takes_linear_time(tools: str) -> None:
    begin = {"hermes": '<tool_call>{"arguments": ', "llama3_json": '{"parameters": ', "mistral": "[TOOL_CALLS] ["}
    opening = TOOL_FORMATS[tools].opening
    for unit in (opening, opening[:-1], opening[0], " ", '{"a":', "[f(a=[", begin.get(tools, "[f(a=") + '{"a": "'):
        text = unit * (20_000 // len(unit))
        for pieces in ([text], list(text[:1_000])):
            message = parse(pieces, tools=tools, reasoning="qwen3")
            assert message.content or message.calls


FRAGMENTS = [
    *MARKERS,
    *(marker[: len(marker) // 2] for marker in MARKERS),
    *'<[]{}():;=", \n-\\',
    '{"name": "',
    '", "arguments": {',
    '"parameters": {"',
    '": ',
    "}}",
    '"}, {"name":"f","arguments":{}}',
    "[f(",
    "=['",
    "function",
    "\n```json\n{",
    "```",
    "<function=f>",
    "<parameter=text>",
    '<invoke name="f">',
    '<parameter name="where">',
    "functions.f:0",
    CALLED,
    "é",
]
OPTIONS = st.fixed_dictionaries(
    {
        "tools": st.sampled_from([None, *MARKS]),
        "reasoning": st.sampled_from([None, "qwen3", "mistral", "gpt-oss"]),
        "in_reasoning": st.booleans(),
        "forced_name": st.sampled_from([None, "f"]),
        "parameter_types": st.sampled_from(["", TYPES]),
    }
)


@st.composite
def answers(draw: st.DrawFn) -> str:
    if draw(st.booleans()):
        examples = [each for texts in EXAMPLES.values() for each in texts] + [PYTHONIC, *ANSWERS.values()]
        text: str = draw(st.sampled_from(["", "<think>a</think>\n\n", "Hm. "])) + draw(st.sampled_from(examples))
        cut = draw(st.integers(0, len(text)))
        inserted: str = draw(st.sampled_from(["", text, *FRAGMENTS]))
        return text[:cut] + inserted + text[cut:]
    return "".join(draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25)))


@given(text=answers(), cuts=st.lists(st.integers(0, 1000), max_size=20), options=OPTIONS)
@settings(max_examples=150, deadline=None)
def test_any_split_gives_the_same_message(text: str, cuts: list[int], options: dict[str, Any]) -> None:
    whole = parse([text], **options)
    assert parse(split(text, cuts), **options) == whole
    assert parse(text, **options) == whole


@given(fragments=st.lists(st.sampled_from([f for f in FRAGMENTS if f != "[CALL_ID]"]), max_size=25), options=OPTIONS)
@settings(max_examples=400, deadline=None)
def test_no_word_of_an_answer_is_lost(fragments: list[str], options: dict[str, Any]) -> None:
    words = [f"w{number}w" for number in range(len(fragments))]
    text = "".join(f"{word}{fragment}" for word, fragment in zip(words, fragments, strict=True))
    message = parse([text], **options)
    found = f"{message.content} {message.reasoning} {message.calls}"
    assert [word for word in words if word not in found] == []


@given(text=answers(), cuts=st.lists(st.integers(0, 1000), max_size=20), options=OPTIONS)
@settings(max_examples=150, deadline=None)
def test_spans_are_the_answer_itself_and_tell_its_content(text: str, cuts: list[int], options: dict[str, Any]) -> None:
    parser = MessageParser(**options)
    spans = [span for piece in split(text, cuts) for span in parser.spans(piece)] + parser.last_spans()
    assert "".join(span.text for span in spans) == text
    assert "".join(span.text for span in spans if span.is_content) == parse([text], **options).content


@given(text=st.text(st.characters(exclude_characters="<[{")), options=OPTIONS)
def test_text_without_markup_passes_unchanged(text: str, options: dict[str, Any]) -> None:
    message = parse([text], **options)
    assert (message.reasoning or message.content) == text or options["in_reasoning"]
    assert message.reasoning + message.content == text
