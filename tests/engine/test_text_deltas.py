"""Text streamed token by token: what is held back, replaced, and released by a stop string or the end.

Stop strings end an answer where its content has them, never within thoughts or calls of tools.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from common.fake_tokenizer import byte_tokenizer
from engine.text.streaming import TextDelta, TextStream
from kvrelay.v1 import inference_pb2 as pb
from tests.engine.text_streams import byte_fallback, byte_ids, byte_level, id_of, llama_like, open_stream, run


def test_stream_of_invalid_fallback_bytes_replaces_each_and_keeps_sent_characters() -> None:
    tokenizer = llama_like()
    stream = open_stream(tokenizer)
    deltas = [stream.push(token_id).text for token_id in byte_ids(tokenizer, b"\xff\xc3\xa9\xe4\xbd!\xe4\xbd")]
    assert deltas == ["�", "", "é", "", "", "��!", "", ""]
    assert stream.flush() == "��"


def test_stream_when_text_follows_an_incomplete_character_replaces_its_bytes_first() -> None:
    tokenizer = llama_like()
    token_ids = [*byte_ids(tokenizer, b"\xe4\xbd"), id_of(tokenizer, "▁Hello")]
    stream = open_stream(tokenizer)
    assert [stream.push(token_id).text for token_id in token_ids] == ["", "", "�� Hello"]
    assert tokenizer.decode(token_ids) == "�� Hello"


def push_text(stops: tuple[str, ...], *tokens: str) -> list[tuple[str, bool]]:
    tokenizer = byte_fallback(decoders.Fuse())
    tokenizer.add_tokens(list(tokens))
    stream = open_stream(tokenizer, stops)
    deltas: list[TextDelta] = [stream.push(id_of(tokenizer, token)) for token in tokens]
    return [(delta.text, delta.stopped) for delta in deltas]


def test_stream_after_a_stop_string_emits_nothing_more() -> None:
    assert push_text(("b",), "ab", "cd") == [("a", True), ("", True)]
    tokenizer = llama_like()
    stream = open_stream(tokenizer, ("lo",))
    stream.prime([id_of(tokenizer, "lo"), id_of(tokenizer, "é")])
    assert stream.flush() == ""


def test_flush_when_the_replaced_bytes_complete_a_stop_string_cuts_before_it() -> None:
    tokenizer = byte_level()
    stream = open_stream(tokenizer, ("x�",))
    stream.prime(byte_ids(tokenizer, b"yx\xe4"))
    assert stream.flush() == ""
    again = open_stream(tokenizer, ("x�",))
    assert [again.push(token_id).text for token_id in byte_ids(tokenizer, b"yx\xe4")] == ["y", "", ""]


def test_stream_after_half_a_surrogate_does_not_wait_for_bytes_that_cannot_come() -> None:
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, stop=(), include_special_tokens=False)
    assert [stream.push(byte).text for byte in b"\xed\xa0\x80a"] == ["", "\ufffd\ufffd", "\ufffd", "a"]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x STOP y"}}\n</tool_call>'
BOTH = pb.AnswerFormat(tools="hermes", reasoning="qwen3")
FORCED = pb.AnswerFormat(forced_name="f")


def marked(answer: pb.AnswerFormat | None, *stops: str) -> TextStream:
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
    assert run(marked(BOTH, *stops), list(text.encode())) == sent


def test_arguments_that_are_the_whole_answer_have_no_stop() -> None:
    assert run(marked(FORCED, "\n", "a"), list(b'{"a":\n1}')) == '{"a":\n1}'
    assert run(marked(None, "a"), list(b'{"a":\n1}')) == '{"'


PIECES = ["<think>", "</think>", "<tool_call>", '{"name": "f", "arguments": {"a": "', '"}}', "</tool_call>", "ST", "OP"]


@given(text=st.lists(st.sampled_from([*PIECES, "STOP", " ", "x", "é"]), max_size=12).map("".join), data=st.data())
def test_another_worker_continues_with_the_same_text(text: str, data: st.DataObject) -> None:
    token_ids = list(text.encode())
    cut = data.draw(st.integers(0, len(token_ids)))
    first, second = marked(BOTH, "STOP"), marked(BOTH, "STOP")
    second.prime(token_ids[:cut])
    before = [first.push(token_id) for token_id in token_ids[:cut]]
    if not any(delta.stopped for delta in before):
        assert run(first, token_ids[cut:]) == run(second, token_ids[cut:])
        whole = "".join(delta.text for delta in before)
        assert run(marked(BOTH, "STOP"), token_ids).startswith(whole)


@given(text=st.lists(st.sampled_from([*PIECES, " ", "x"]), max_size=12).map("".join))
def test_no_text_is_lost_or_moved_where_no_stop_comes(text: str) -> None:
    assert run(marked(BOTH, "none such"), list(text.encode())) == text
