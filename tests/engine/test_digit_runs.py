"""Numbers and space in JSON end, however much a model likes to go on; all else stays as the grammar has it."""

from collections.abc import Sequence

import pytest

from common.chat.grammars import after_reasoning, structure_lark, tool_grammar
from common.structured_outputs import Structure, structure_text
from engine.text.digit_runs import MAX_DIGITS
from engine.text.grammar import GrammarState
from tests.builders import FAKE_GRAMMARS

NUMBERS = {"type": "array", "items": {"type": "number"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": '


def num_taken(structure: object, text: str) -> int:
    """Return how many bytes of a text an answer may begin with."""
    state, taken = FAKE_GRAMMARS.compile(structure_text(structure)).begin(), list[int]()
    for byte in text.encode():
        if not state.allowed(taken)[byte]:
            break
        taken.append(byte)
    return len(taken)


def thinking_before(structure: Structure) -> dict[str, str]:
    lark = structure_lark(structure)
    return {"grammar": after_reasoning(lark, "qwen3", is_content=True, in_reasoning=True, max_tokens=None)}


@pytest.mark.parametrize(
    ("structure", "before"),
    [
        ({"json": {}}, ""),
        ({"json": {"type": "integer", "minimum": 0}}, ""),
        ({"json": NUMBERS}, "[1, -"),
        ({"json": NUMBERS}, "[0."),
        ({"json": NUMBERS}, "[1e+"),
        ({"json_object": True}, '{"a": [{"b": '),
        (thinking_before(Structure("json", {"type": "integer"})), "Hm.</think>"),
        ({"grammar": tool_grammar("hermes", [TOOL], name=None, parallel=True)}, CALL),
    ],
)
def test_digits_in_a_row_are_bounded(structure: object, before: str) -> None:
    assert num_taken(structure, before + "1" * 300) == len(before) + MAX_DIGITS


@pytest.mark.parametrize("structure", [{"json": {"type": "object"}}, {"json_object": True}])
def test_space_between_tokens_is_bounded(structure: object) -> None:
    assert num_taken(structure, "{" + "\n " * 300) < 200
    assert num_taken(structure, '{\n            "a": 1}') == 21


@pytest.mark.parametrize(
    "structure",
    [{"regex": "[0-9]+"}, {"grammar": "start: /[0-9]+/"}, {"json": {"type": "string", "pattern": "^[0-9]{300}$"}}],
)
def test_digits_that_are_asked_for_are_not_cut(structure: object) -> None:
    text = "1" * 300 if "json" not in str(structure) else '"' + "1" * 300
    assert num_taken(structure, text) == len(text)


def test_drafts_end_where_a_number_has_to() -> None:
    def state() -> GrammarState:
        return FAKE_GRAMMARS.compile(structure_text({"json": NUMBERS})).begin()

    output: Sequence[int] = list(b"[1" + b"2" * (MAX_DIGITS - 11))
    assert state().num_following(output, list(b"3" * 20)) == 10
    assert state().num_following(output, list(b"3" * 5 + b"]")) == 6
    masks = state().allowed_along(output, list(b"3" * 10))
    assert [bool(mask[ord("3")]) for mask in masks] == [True] * 10 + [False]
