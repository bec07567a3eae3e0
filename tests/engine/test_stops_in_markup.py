"""Stop strings end an answer where its content has them, never within thoughts or calls of tools."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.fake_tokenizer import byte_tokenizer
from engine.text import TextStream
from kvrelay.v1 import inference_pb2 as pb
from tests.engine.text_streams import run

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x STOP y"}}\n</tool_call>'
BOTH = pb.AnswerFormat(tools="hermes", reasoning="qwen3")
FORCED = pb.AnswerFormat(forced_name="f")


def stream(answer: pb.AnswerFormat | None, *stops: str) -> TextStream:
    return TextStream(byte_tokenizer(), stop=stops, include_special_tokens=False, answer_format=answer)


@pytest.mark.parametrize(
    ("text", "stops", "sent"),
    [
        ("<think>a STOP b</think>\n\nc STOP d", ["STOP"], "<think>a STOP b</think>\n\nc "),
        ("<think>a</think>b", ["</think>", "a"], "<think>a</think>b"),
        (CALL, ["\n", '"', "STOP", "</tool_call>"], CALL),
        (f"Well: STO{CALL}P then STOP it", ["STOP"], f"Well: STO{CALL}P then "),
        (f"Well: STOP{CALL}", ["STOP"], "Well: "),
        ('<tool_call>{"name": 5} STOP', ["STOP"], '<tool_call>{"name": 5} '),
        ("a <tool STOP", ["STOP"], "a <tool "),
        ("a STO", ["STOP"], "a STO"),
    ],
)
def test_stop_strings_are_compared_with_the_content_alone(text: str, stops: list[str], sent: str) -> None:
    assert run(stream(BOTH, *stops), list(text.encode())) == sent


def test_arguments_that_are_the_whole_answer_have_no_stop() -> None:
    assert run(stream(FORCED, "\n", "a"), list(b'{"a":\n1}')) == '{"a":\n1}'
    assert run(stream(None, "a"), list(b'{"a":\n1}')) == '{"'


PIECES = ["<think>", "</think>", "<tool_call>", '{"name": "f", "arguments": {"a": "', '"}}', "</tool_call>", "ST", "OP"]


@given(text=st.lists(st.sampled_from([*PIECES, "STOP", " ", "x", "é"]), max_size=12).map("".join), data=st.data())
def test_another_worker_continues_with_the_same_text(text: str, data: st.DataObject) -> None:
    token_ids = list(text.encode())
    cut = data.draw(st.integers(0, len(token_ids)))
    first, second = stream(BOTH, "STOP"), stream(BOTH, "STOP")
    second.prime(token_ids[:cut])
    before = [first.push(token_id) for token_id in token_ids[:cut]]
    if not any(delta.stopped for delta in before):
        assert run(first, token_ids[cut:]) == run(second, token_ids[cut:])
        whole = "".join(delta.text for delta in before)
        assert run(stream(BOTH, "STOP"), token_ids).startswith(whole)


@given(text=st.lists(st.sampled_from([*PIECES, " ", "x"]), max_size=12).map("".join))
def test_no_text_is_lost_or_moved_where_no_stop_comes(text: str) -> None:
    assert run(stream(BOTH, "none such"), list(text.encode())) == text
