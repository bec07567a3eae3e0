"""Content blocks of an answer: the same however its text comes, and nothing of it is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chat.parsing import MessageParser
from kvrelay.v1 import inference_pb2 as pb
from router.http.anthropic.answers import input_of
from router.http.blocks import BlockChange, BlockDelta, BlockKind, Blocks, BlockStart, BlockStop

BOTH = pb.AnswerFormat(tools="hermes", reasoning="qwen3")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = f"<think>hm</think>\n\nI look.{CALL}{CALL}Done."
TEXTS = st.lists(
    st.sampled_from(
        [*CALL, CALL, *ANSWER, "<think>", "</think>", "<tool_call>", '{"name": "g", "arguments": {}}', "é"]
    ),
    max_size=12,
)


def changes_of(pieces: list[str], answer_format: pb.AnswerFormat = BOTH) -> list[BlockChange]:
    blocks = Blocks(answer_format, request_id="req-1")
    changes: list[BlockChange] = []
    for piece in pieces:
        blocks.push(piece)
        changes += blocks.take()
    blocks.finish()
    return changes + blocks.take()


def whole(changes: list[BlockChange]) -> list[tuple[str, str, str]]:
    """Return kind, tool and text of each block; changes must be in order."""
    found: list[tuple[str, str, str]] = []
    is_open = False
    for change in changes:
        match change:
            case BlockStart(block=block):
                assert not is_open
                assert block.index == len(found)
                found.append((block.kind.value, block.name, ""))
                is_open = True
            case BlockDelta(block=block, text=text):
                assert is_open
                assert block.index == len(found) - 1
                assert text
                found[-1] = (*found[-1][:2], found[-1][2] + text)
            case BlockStop(block=block):
                assert is_open
                assert block.index == len(found) - 1
                is_open = False
    assert not is_open
    return found


def test_thoughts_text_and_calls_are_blocks_in_order() -> None:
    assert whole(changes_of(list(ANSWER))) == [
        ("thinking", "", "hm"),
        ("text", "", "I look."),
        ("tool_use", "f", '{"a": 1}'),
        ("tool_use", "f", '{"a": 1}'),
        ("text", "", "Done."),
    ]


def test_calls_have_ids_of_their_own() -> None:
    begun = [change.block for change in changes_of(list(ANSWER)) if isinstance(change, BlockStart)]
    ids = [block.call_id for block in begun if block.kind is BlockKind.TOOL_USE]
    assert len(set(ids)) == len(ids) == 2
    assert all(block.call_id == "" for block in begun if block.kind is not BlockKind.TOOL_USE)


def test_answer_without_markup_is_one_block_of_its_text() -> None:
    assert whole(changes_of(["a", "<think>", "b"], pb.AnswerFormat())) == [("text", "", "a<think>b")]
    assert whole(changes_of(["", ""], pb.AnswerFormat())) == []


@given(TEXTS)
def test_blocks_hold_what_the_parser_finds(pieces: list[str]) -> None:
    parser = MessageParser(tools="hermes", reasoning="qwen3")
    delta = parser.push("".join(pieces), is_last=True)
    blocks = whole(changes_of(pieces))
    assert "".join(text for kind, _, text in blocks if kind == "text") == delta.content
    assert "".join(text for kind, _, text in blocks if kind == "thinking") == delta.reasoning
    arguments = "".join(call.arguments for call in delta.tool_calls)
    assert "".join(text for kind, _, text in blocks if kind == "tool_use") == arguments
    assert [name for kind, name, _ in blocks if kind == "tool_use"] == [c.name for c in delta.tool_calls if c.name]


@pytest.mark.parametrize(
    ("arguments", "given_as"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        ('{"a": ', {"INVALID_JSON": '{"a": '}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("[" * 100_000, {"INVALID_JSON": "[" * 100_000}),
    ],
)
def test_input_of_a_call_is_always_an_object(arguments: str, given_as: dict[str, object]) -> None:
    assert input_of(arguments) == given_as
