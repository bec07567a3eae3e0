"""Calls in the markup of each family: typed values, unfinished ones, thoughts in channels, and the way back."""

import json
from typing import Any

import pytest

from common.chat.detection import detect_reasoning_format, detect_tool_format
from common.chat.formats import MAX_TOOL_NAME_CHARS
from common.chat.grammars import after_reasoning, limited_reasoning, structure_lark, tool_grammar
from common.chat.parameter_types import parameter_types
from common.chat.parsing import MessageParser
from common.structured_outputs import read_structure
from kvrelay.v1 import inference_pb2 as pb
from router.reading.conversation import ChatFormats, read_conversation
from tests.common.chat.dialects import ANSWERS, ARGUMENTS, CALLED, REASONING, TEMPLATES, TYPES
from tests.common.chat.parsed import parse
from tests.common.chat.templates import CALLS, answer_by
from tests.common.chat.test_grammars import ALL_IDS, compiled, text_of, tokenizer, walk


@pytest.mark.parametrize("tools", ANSWERS)
@pytest.mark.parametrize("before", ["", "Let me see:\n\n"])
def test_calls_of_each_family_are_read_with_their_types(tools: str, before: str) -> None:
    if tools == "llama4_json":
        before = ""  # begins the answer, or is text
    for pieces in ([before, ANSWERS[tools], "\n"], list(f"{before}{ANSWERS[tools]}\n")):
        message = parse(pieces, tools=tools, parameter_types=TYPES)
        (name, arguments), second = message.calls
        assert (name, json.loads(arguments), second) == ("f", ARGUMENTS, ("g.h-1", "{}"))
        assert message.content.rstrip() == before.rstrip()


@pytest.mark.parametrize("tools", ANSWERS)
def test_call_that_is_cut_anywhere_is_never_a_finished_one(tools: str) -> None:
    text = ANSWERS[tools]
    for end in range(len(text)):
        parser = MessageParser(tools=tools, reasoning=None, parameter_types=TYPES)
        message = parser.push(text[:end], is_last=True)
        if parser.ends_in_calls:
            assert json.loads("".join(call.arguments for call in message.tool_calls if call.index == 0)) == ARGUMENTS


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", ["string"], "5"),
        ("true", ["string", "null"], "true"),
        ("null", ["string", "null"], None),
        ("5", ["string", "integer"], 5),
        ("five", ["integer"], "five"),
        (" 5 ", ["number"], 5),
        ("False", ["boolean"], False),
        ("{'a': None,}", ["object"], {"a": None}),
        ('"a"', ["string", "array"], '"a"'),
        ('1, "b": 2', ["integer"], '1, "b": 2'),
        ('1, "": 2', ["integer"], '1, "": 2'),
        ("9007199254740993", ["integer"], 9007199254740993),
        ("", ["array"], ""),
        ("[" * 99, ["array"], "[" * 99),
        ("\n a\n\n", ["string"], "\n a\n\n"),
    ],
)
def test_plain_values_have_the_type_that_the_schema_allows(text: str, types: list[str], value: Any) -> None:
    answer = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    message = parse(list(answer), tools="qwen3_coder", parameter_types=json.dumps({"f": {"a": types}}))
    assert [(name, json.loads(arguments)) for name, arguments in message.calls] == [("f", {"a": value})]


def test_text_of_an_argument_streams_before_it_ends() -> None:
    parser = MessageParser(tools="glm45", reasoning=None, parameter_types=TYPES)
    pushed = parser.push("<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>one\n<").tool_calls
    assert [(call.name, call.arguments) for call in pushed] == [("f", '{"text": "one\\n')]
    assert parser.push("b></arg_").tool_calls[0].arguments == "<b>"


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f g>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter>1</parameter>\n</function>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n"),
        ("glm45", "<tool_call>{}</tool_call>"),
        ("glm45", "<tool_call>not a call</tool_call>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke tool="f">\n</invoke>'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:x<|tool_call_argument_begin|>{}"),
        ("gpt-oss", "<|channel|>commentary to=python<|message|>1 + 1"),
        ("gpt-oss", "<|channel|>thoughts<|message|>Hm."),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>not JSON"),
        ("granite", "<|tool_call|>[1]"),
    ],
)
def test_text_that_resembles_a_call_of_a_family_stays_text(tools: str, text: str) -> None:
    for pieces in ([f"{text}  "], list(f"{text}  ")):
        message = parse(pieces, tools=tools)
        assert (message.content, message.calls) == (f"{text}  ", [])


def test_broken_call_of_plain_values_keeps_its_text_and_lets_others_follow() -> None:
    broken = '<invoke name="f">\n<parameter name="count">1</parameter>\nno more</invoke>\n</minimax:tool_call> So.'
    parser = MessageParser(tools="minimax_m2", reasoning=None, parameter_types=TYPES)
    delta = parser.push(f"<minimax:tool_call>{broken}", is_last=True)
    assert (delta.content, delta.tool_calls[0].arguments) == (" So.", '{"count": 1\nno more</invoke>\n')
    assert not parser.ends_in_calls


def test_channels_are_thoughts_content_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant{CALLED}now json<|message|>{{}}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Ok<|return|>"
    )
    for pieces in ([text], list(text)):
        both = parse(pieces, tools="gpt-oss", reasoning="gpt-oss")
        assert (both.reasoning, both.content, both.calls) == ("Hm <b>.", "I look.Ok", [("now", "{}")])
    assert parse([text], tools="gpt-oss").content == "Hm <b>.I look.Ok"
    untooled = parse(
        ["<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Ok"], reasoning="gpt-oss"
    )
    assert (untooled.reasoning, untooled.content) == ("Hm", "Ok")


@pytest.mark.parametrize(
    ("reasoning", "text"),
    [
        ("mistral", "[THINK]Hm [1][/THINK]Yes."),
        ("seed_oss", "<seed:think>Hm [1]</seed:think>Yes."),
        ("granite", "Here is my thought process:Hm [1]Here is my response:Yes."),
        ("glm45", "\n<think>Hm [1]</think>\nYes."),
    ],
)
def test_thoughts_of_each_family_are_told_from_content(reasoning: str, text: str) -> None:
    for pieces in ([text], list(text)):
        message = parse(pieces, reasoning=reasoning)
        assert (message.reasoning, message.content) == ("Hm [1]", "Yes.")


@pytest.mark.parametrize("tools", TEMPLATES)
def test_calls_that_the_template_of_a_family_writes_are_read_back(tools: str) -> None:
    source = TEMPLATES[tools]
    assert (detect_tool_format(source), detect_reasoning_format(source)) == (tools, REASONING.get(tools))
    written = answer_by(source)
    if tools == "kimi_k2":
        written = written.replace("abcdefghi", "functions.get_weather:0", 1).replace("abcdefghi", "functions.now:1")
    message = parse([written[written.index("<") :]], tools=tools, parameter_types=TYPES)
    assert [(name, json.loads(arguments)) for name, arguments in message.calls] == CALLS


def test_kimi_is_told_the_names_of_earlier_calls_by_their_ids() -> None:
    chat = pb.ChatPrompt()
    for name in ("f", "g"):
        chat.messages.add(role="assistant").tool_calls.add(id="call00000", name=name, arguments="{}")
        chat.messages.add(role="tool", tool_call_id="call00000", content="ok")
    read = read_conversation(chat, ChatFormats(tools="kimi_k2")).messages
    ids = [each["tool_calls"][0]["id"] if "tool_calls" in each else each["tool_call_id"] for each in read]
    assert ids == ["functions.f:0", "functions.f:0", "functions.g:1", "functions.g:1"]
    assert read_conversation(chat, ChatFormats(tools="hermes")).messages[1]["tool_call_id"] == "call00000"


@pytest.mark.parametrize("is_text", [True, False])
def test_forced_call_and_structure_follow_thoughts_in_channels(is_text: bool) -> None:
    token_ids = {} if is_text else ALL_IDS

    def ids_of(text: str) -> list[int]:
        return list(text.encode()) if is_text else tokenizer().encode(text).ids

    tools = [{"type": "function", "function": {"name": "now"}}]
    call = tool_grammar("gpt-oss", tools, name="now", parallel=False, token_ids=token_ids)
    lark = after_reasoning(call, "gpt-oss", is_content=False, in_reasoning=False, max_tokens=None, token_ids=token_ids)
    thought = "<|channel|>analysis<|message|>Hm<|end|>"
    for begun in ("<|channel|>co", thought):  # thoughts drawn at random would not end
        answer = text_of(walk(compiled(lark, token_ids), 1, begun=ids_of(begun)))
        message = parse([answer], tools="gpt-oss", reasoning="gpt-oss")
        assert (message.content, message.calls) == ("", [("now", "{}")])
    choice = structure_lark(read_structure('{"choice": ["yes"]}'))
    lark = after_reasoning(choice, "gpt-oss", is_content=True, in_reasoning=False, max_tokens=None, token_ids=token_ids)
    answer = f"{thought}<|start|>assistant<|channel|>final<|message|>yes"
    state = compiled(lark, token_ids).begin()
    state.allowed(ids_of(answer))
    assert (state.is_complete, state.error) == (True, "")
    with pytest.raises(ValueError, match="gpt-oss thinks in several messages"):
        limited_reasoning("gpt-oss", in_reasoning=False, max_tokens=3, token_ids=ALL_IDS)


@pytest.mark.parametrize(
    ("parameter", "fault"),
    [
        ({"a b": {}}, "'a b' of f cannot be written in qwen3_coder's tags"),
        ({"a": {"type": "string", "pattern": "x+"}}, "'a' of f cannot be forced: plain text keeps to no pattern"),
        ({"a": {"anyOf": [{"type": "string", "format": "date"}]}}, "'a' of f cannot be forced"),
    ],
)
def test_forced_plain_value_that_no_grammar_can_bind_is_refused_by_name(parameter: Any, fault: str) -> None:
    tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": parameter}}}
    with pytest.raises(ValueError, match=fault):
        tool_grammar("qwen3_coder", [tool], name="f", parallel=False)


@pytest.mark.timeout(30)
def test_references_that_fan_out_are_each_followed_once() -> None:
    branch = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{m % 40}"} for m in (n, n + 1, n + 2)]} for n in range(40)}
    schema: dict[str, Any] = {
        "properties": {"x": {"$ref": "#/$defs/a0"}},
        "$defs": {**branch, "a0": {"type": ["string", "integer"]}},
    }
    assert json.loads(parameter_types([{"name": "f", "parameters": schema}]))["f"]["x"] == ["integer", "string"]
    schema["properties"]["x"] = {"anyOf": [{"$ref": "#/$defs/a1"}, {"$ref": "#/$defs/a0"}]}
    lark = tool_grammar("qwen3_coder", [{"function": {"name": "f", "parameters": schema}}], name="f", parallel=False)
    assert len(lark) < 20_000


@pytest.mark.parametrize("tools", ANSWERS)
def test_names_as_long_as_tools_may_have_are_read(tools: str) -> None:
    name = "n" * MAX_TOOL_NAME_CHARS
    message = parse([ANSWERS[tools].replace("g.h-1", name)], tools=tools, parameter_types=TYPES)
    assert message.calls[1] == (name, "{}")


def test_text_behind_calls_keeps_its_space() -> None:
    for call in ("[TOOL_CALLS]f[ARGS]{}", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'):
        assert parse([f"{call} Done."], tools="mistral").content == " Done."
    assert parse([f"{ANSWERS['qwen3_coder']} Done."], tools="qwen3_coder").content == " Done."


def test_forced_plain_text_ends_where_the_reader_ends_it() -> None:
    function = {
        "name": "f",
        "parameters": {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]}}},
    }
    for tools in ("qwen3_coder", "minimax_m2", "glm45", "seed_oss"):
        for token_ids in ({}, ALL_IDS):
            lark = tool_grammar(tools, [{"function": function}], name="f", parallel=False, token_ids=token_ids)
            for seed in range(12):
                parser = MessageParser(tools=tools, reasoning=None)
                parser.push(text_of(walk(compiled(lark, token_ids), seed)), is_last=True)
                assert parser.ends_in_calls
