"""Answers drawn at random from a grammar are tool calls whose arguments fit, and thinking that keeps its limit."""

import json
import random
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from common.chat.detection import detect_tool_format
from common.chat.formats import MARKERS, TOOL_FORMATS
from common.chat.grammars import after_reasoning, limited_reasoning, structure_lark, tool_grammar
from common.chat.parameter_types import parameter_types
from common.errors import InvalidRequest
from common.fake_tokenizer import EOS_TOKEN_ID, byte_tokenizer
from common.structured_outputs import read_structure
from engine.text.grammar import Grammar, Grammars
from tests.common.chat.parsed import MARKS, Message, parse
from tests.common.chat.templates import CALLS, TEMPLATES, answer_by

CITY = {"type": "string", "maxLength": 8}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"$ref": "#/$defs/City"},
                    "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
                    "is_metric": {"type": "boolean"},
                    "unit": {"enum": ["K", "°C", None]},
                    "where": {
                        "type": "object",
                        "properties": {
                            "lat": {"type": "number"},
                            "tags": {"type": "array", "items": CITY},
                        },
                        "required": ["lat"],
                        "additionalProperties": False,
                    },
                },
                "required": ["city", "days"],
                "additionalProperties": False,
                "$defs": {"City": CITY},
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "get_weather.v2", "parameters": {"properties": {}, "additionalProperties": False}},
    },
    {"type": "function", "function": {"name": "now"}},
]
TYPES = parameter_types([tool["function"] for tool in TOOLS])
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}


@cache
def tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and every marker as a token of its own."""
    made = byte_tokenizer()
    made.add_tokens([tokenizers.AddedToken(marker, special=False) for marker in MARKERS])
    return made


def marker_ids(made: tokenizers.Tokenizer) -> dict[str, int]:
    return {marker: token_id for marker in MARKERS if (token_id := made.token_to_id(marker)) is not None}


ALL_IDS = marker_ids(tokenizer())
NO_ARGS = {marker: token_id for marker, token_id in ALL_IDS.items() if marker not in ("[ARGS]", "[CALL_ID]")}
ENDS = set(b'"}]), ')
BYTES = Grammars(byte_tokenizer(), vocab_size=EOS_TOKEN_ID + 1, eos_token_ids=frozenset({EOS_TOKEN_ID}))
TOKENS = Grammars(tokenizer(), vocab_size=tokenizer().get_vocab_size(), eos_token_ids=frozenset({EOS_TOKEN_ID}))


def compiled(lark: str, token_ids: Mapping[str, int]) -> Grammar:
    return (TOKENS if token_ids else BYTES).compile(json.dumps({"grammar": lark}))


def text_of(token_ids: list[int]) -> str:
    words = {token_id: marker.encode() for marker, token_id in ALL_IDS.items()}
    return b"".join(words.get(each) or bytes([each]) for each in token_ids).decode(errors="replace")


def walk(grammar: Grammar, seed: int, *, begun: Iterable[int] = ()) -> list[int]:
    """Return an answer drawn from a grammar; bytes that end something are drawn more often."""
    rng, state, token_ids = random.Random(seed), grammar.begin(), list(begun)
    for _ in range(3000):
        allowed = state.allowed(token_ids)
        choices = [int(each) for each in np.flatnonzero(allowed)]
        if state.is_complete and (choices == [EOS_TOKEN_ID] or rng.random() < 0.4):
            return token_ids
        closing = [each for each in choices if each in ENDS or each > EOS_TOKEN_ID]
        choices = [each for each in choices if each != EOS_TOKEN_ID]
        assert choices, state.error or text_of(token_ids)
        token_ids.append(rng.choice(closing if closing and rng.random() < 0.5 else choices))
    raise AssertionError(f"no end: {text_of(token_ids)[-200:]}")


def check_calls(message: Message) -> list[str]:
    assert message.content == ""
    for name, arguments in message.calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return [name for name, _arguments in message.calls]


@pytest.mark.parametrize("token_ids", [{}, NO_ARGS, ALL_IDS], ids=["text", "tokens", "more tokens"])
@pytest.mark.parametrize("tools", MARKS)
def test_answer_is_calls_whose_arguments_fit(tools: str, token_ids: Mapping[str, int]) -> None:
    lark = tool_grammar(tools, TOOLS, name=None, parallel=True, token_ids=token_ids)
    grammar, names, counts = compiled(lark, token_ids), set(), set()
    for seed in range(12):
        message = parse([text_of(walk(grammar, seed))], tools=tools, parameter_types=TYPES)
        called = check_calls(message)
        names.update(called)
        counts.add(len(called))
    assert names == set(SCHEMAS)
    assert 0 not in counts
    assert (len(counts) > 1) == (tools != "gpt-oss"), "a message in channels is one call"


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja") if "Nemo" not in path.stem))
def test_grammar_takes_calls_as_the_template_writes_them(name: str) -> None:
    # Nemo's template adds ids that the model does not write.
    source = (TEMPLATES / f"{name}.jinja").read_text()
    written = answer_by(source)
    tools = detect_tool_format(source)
    assert tools is not None
    ends = [written.rfind(end) + len(end) for end in ("</tool_call>", "<｜tool▁calls▁end｜>", "{}") if end in written]
    answer = written[written.index(TOOL_FORMATS[tools].opening) : max(ends)]
    functions = [{"function": {"name": called, "parameters": {}}} for called, _arguments in CALLS]
    lark = tool_grammar(tools, functions, name=None, parallel=True, token_ids=ALL_IDS)
    token_ids = tokenizer().encode(answer).ids
    state = compiled(lark, ALL_IDS).begin()
    state.allowed(token_ids)
    assert (state.is_complete, state.error) == (True, "")


@pytest.mark.parametrize("tools", MARKS)
def test_one_call_of_the_named_tool(tools: str) -> None:
    for name in SCHEMAS:
        lark = tool_grammar(tools, TOOLS, name=name, parallel=False, token_ids=ALL_IDS)
        for seed in range(5):
            message = parse(
                [text_of(walk(compiled(lark, ALL_IDS), seed))], tools=tools, forced_name=name, parameter_types=TYPES
            )
            assert check_calls(message) == [name]


@pytest.mark.parametrize("tools", MARKS)
@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {}, "additionalProperties": False}}},
        {"properties": {"a": {"oneOf": [{"type": "null"}, {"enum": ["x", True]}]}}, "additionalProperties": False},
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}}},
    ],
    ids=["reference", "one of", "recursive"],
)
def test_schemas_of_real_tools_compile(tools: str, parameters: dict[str, Any]) -> None:
    function = {"name": "f", "parameters": parameters, "strict": True}
    lark = tool_grammar(tools, [{"type": "function", "function": function}], name="f", parallel=False)
    compiled(lark, {})


def test_without_a_format_the_answer_is_the_arguments_of_the_named_tool() -> None:
    lark = tool_grammar(None, TOOLS, name="get_weather", parallel=True)
    for seed in range(5):
        message = parse([text_of(walk(compiled(lark, {}), seed))], forced_name="get_weather")
        assert check_calls(message) == ["get_weather"]
    with pytest.raises(ValueError, match="no known format"):
        tool_grammar(None, TOOLS, name=None, parallel=False)


@pytest.mark.parametrize(
    ("tools", "parameters", "fault"),
    [
        ("hermes", {"type": "string"}, "not the schema of an object"),
        ("hermes", True, "not the schema of an object"),
        ("pythonic", {"properties": {"a b": {}}}, "'a b' of f cannot be passed by keyword"),
        ("pythonic", {"properties": []}, "parameters of f are not a JSON schema"),
        ("pythonic", {"required": [[]]}, "parameters of f are not a JSON schema"),
        ("pythonic", {"required": ["a"]}, "'a' of f is required, but has no schema"),
    ],
)
def test_tool_that_cannot_be_called_is_refused(tools: str, parameters: Any, fault: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ValueError, match=fault):
        tool_grammar(tools, [tool], name=None, parallel=True)
    with pytest.raises(ValueError, match="no tool 'g'"):
        tool_grammar(tools, [tool], name="g", parallel=True)
    with pytest.raises(ValueError, match="no tool to call"):
        tool_grammar(tools, [], name=None, parallel=True)


@pytest.mark.parametrize("tools", MARKS)
def test_many_tools_stay_within_the_limits(tools: str) -> None:
    many = [
        {"type": "function", "function": TOOLS[0]["function"] | {"name": f"tool_{number}"}} for number in range(128)
    ]
    grammar = compiled(tool_grammar(tools, many, name=None, parallel=True, token_ids=ALL_IDS), ALL_IDS)
    message = parse([text_of(walk(grammar, 0))], tools=tools, parameter_types=TYPES)
    assert message.content == ""
    assert message.calls


@pytest.mark.parametrize("token_ids", [{}, ALL_IDS], ids=["text", "tokens"])
@pytest.mark.parametrize("in_reasoning", [True, False])
def test_calls_follow_the_thinking(token_ids: Mapping[str, int], in_reasoning: bool) -> None:
    calls = tool_grammar("hermes", TOOLS, name="now", parallel=False, token_ids=token_ids)
    lark = after_reasoning(
        calls, "qwen3", is_content=False, in_reasoning=in_reasoning, max_tokens=None, token_ids=token_ids
    )
    grammar, thoughts = compiled(lark, token_ids), list[str]()
    # Text that closes the thinking would not be found at random.
    begun = b"" if token_ids else b"Hm < ya.</think>" if in_reasoning else b"<think>Hm.</think>"
    for seed in range(10):
        answer = text_of(walk(grammar, seed, begun=begun))
        message = parse([answer], tools="hermes", reasoning="qwen3", in_reasoning=in_reasoning)
        assert check_calls(message) == ["now"]
        thoughts.append(message.reasoning)
    assert any(thoughts), "some answers think first"


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
@pytest.mark.parametrize("in_reasoning", [True, False])
def test_thinking_is_cut_at_its_limit(max_tokens: int, in_reasoning: bool) -> None:
    open_id, close_id = ALL_IDS["<think>"], ALL_IDS["</think>"]
    limits: dict[str, Any] = {"in_reasoning": in_reasoning, "max_tokens": max_tokens, "token_ids": ALL_IDS}
    answered = after_reasoning('start: "yes"', "qwen3", is_content=True, **limits)
    for lark in (answered, limited_reasoning("deepseek_r1", **limits)):
        state = compiled(lark, ALL_IDS).begin()
        thought = [] if in_reasoning else [open_id]
        for _ in range(max_tokens):
            allowed = state.allowed(thought)
            assert allowed[close_id] or thought == [open_id] or not thought
            assert not allowed[EOS_TOKEN_ID]
            thought.append(ord("a"))
        assert list(np.flatnonzero(state.allowed(thought))) == [close_id]
        assert compiled(lark, ALL_IDS).begin().allowed([*thought, close_id])[ord("y")]


def test_any_answer_may_follow_limited_thinking() -> None:
    lark = limited_reasoning("qwen3", in_reasoning=False, max_tokens=3, token_ids=ALL_IDS)
    state = compiled(lark, ALL_IDS).begin()
    for answer in ([], [ord("a")], [ord("a"), ALL_IDS["<tool_call>"]]):
        allowed = state.allowed(answer)
        assert state.is_complete
        assert allowed.sum() == TOKENS.compile('{"grammar": "start: <[*]>*"}').begin().allowed(()).sum() - bool(answer)
    with pytest.raises(ValueError, match="<think> is not a token"):
        limited_reasoning("qwen3", in_reasoning=False, max_tokens=3, token_ids={})
    with pytest.raises(ValueError, match="</think> is not a token"):
        after_reasoning('start: "x"', "qwen3", is_content=False, in_reasoning=True, max_tokens=3)


def test_limit_counts_the_same_when_tokens_are_read_again() -> None:
    limits: dict[str, Any] = {"in_reasoning": True, "max_tokens": 40, "token_ids": ALL_IDS}
    lark = after_reasoning('start: "yes"', "qwen3", is_content=True, **limits)
    grammar = compiled(lark, ALL_IDS)
    answer = [*("Zürich 雪".encode() * 3), ALL_IDS["</think>"], *b"\n\nyes"]
    for cut in (answer, [*b"a" * 39, 0xE9, ALL_IDS["</think>"], *b"yes"]):
        state = grammar.begin()
        for num_tokens in range(len(cut) + 1):
            stepwise = state.allowed(cut[:num_tokens])
            again = grammar.begin()
            assert np.array_equal(stepwise, again.allowed(cut[:num_tokens]))
            assert state.is_complete == again.is_complete == (num_tokens == len(cut))
            assert not state.error


@pytest.mark.parametrize(
    ("structure", "right", "wrong"),
    [
        ({"json": {"type": "integer", "x-guidance": 3}}, "12", "x"),
        ({"json": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}, '{"a": 1}', '{"a": 2}'),
        ({"json_object": True}, '{"a": [1]}', "[1]"),
        ({"regex": 'a/b\\/"[/]#\\n?'}, 'a/b/"/#\n', "ab"),
        ({"choice": ["yes", 'n"o', "é"]}, "é", "e"),
        ({"grammar": 'start: a{2} B // }\na: "("\nB: /[}]/'}, "((}", "(}"),
    ],
    ids=["options", "json", "json_object", "regex", "choice", "grammar"],
)
def test_structures_follow_thinking(structure: dict[str, Any], right: str, wrong: str) -> None:
    lark = structure_lark(read_structure(json.dumps(structure)))
    thinking = after_reasoning(lark, "qwen3", is_content=False, in_reasoning=True, max_tokens=9, token_ids=ALL_IDS)
    for source, before in ((lark, []), (thinking, [*b"hm", ALL_IDS["</think>"], *b"\n\n"])):
        grammar = compiled(source, ALL_IDS)
        grammar.check([*before, *right.encode()])
        state = grammar.begin()
        state.allowed([*before, *right.encode()])
        assert state.is_complete
        with pytest.raises(InvalidRequest):
            grammar.check([*before, *wrong.encode()])


def test_branches_that_may_fit_together_are_refused_after_thinking_too() -> None:
    with pytest.raises(ValueError, match="#/oneOf: one answer may fit branch 0 and branch 1"):
        structure_lark(read_structure('{"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}'))
