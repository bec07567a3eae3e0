"""Text streamed token by token: what is held back, replaced, and released by a stop string or the end."""

import pytest
from tokenizers import decoders

from common.fake_tokenizer import byte_tokenizer
from engine.text import TextDelta, TextStream
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


def test_stream_of_endless_invalid_bytes_never_holds_back_more_than_one_character() -> None:
    tokenizer = byte_level()
    stream = open_stream(tokenizer)
    lead = byte_ids(tokenizer, b"\xf0")[0]
    assert [stream.push(lead).text for _ in range(500)] == ["", *["�"] * 499]
    assert stream.flush() == "�"


def push_text(stops: tuple[str, ...], *tokens: str) -> list[tuple[str, bool]]:
    tokenizer = byte_fallback(decoders.Fuse())
    tokenizer.add_tokens(list(tokens))
    stream = open_stream(tokenizer, stops)
    deltas: list[TextDelta] = [stream.push(id_of(tokenizer, token)) for token in tokens]
    return [(delta.text, delta.stopped) for delta in deltas]


@pytest.mark.parametrize(
    ("stops", "tokens", "deltas"),
    [
        pytest.param(("stop",), ("x s", "t", "op y"), [("x ", False), ("", False), ("", True)], id="over three tokens"),
        pytest.param(("stop",), ("s", "to", "x"), [("", False), ("", False), ("stox", False)], id="not completed"),
        pytest.param(
            ("aab",), ("a", "a", "ab"), [("", False), ("", False), ("a", True)], id="begins in a failed beginning"
        ),
        pytest.param(("b", "aab"), ("xaa", "bz"), [("x", False), ("", True)], id="longest of those that end together"),
        pytest.param(("abcd", "bc"), ("xabcd",), [("xa", True)], id="first complete wins over begun earlier"),
        pytest.param(("o",), ("hello world",), [("hell", True)], id="one character"),
    ],
)
def test_stop_string_is_held_back_while_it_may_come_and_never_emitted(
    stops: tuple[str, ...], tokens: tuple[str, ...], deltas: list[tuple[str, bool]]
) -> None:
    assert push_text(stops, *tokens) == deltas


def test_stream_after_a_stop_string_emits_nothing_more() -> None:
    assert push_text(("b",), "ab", "cd") == [("a", True), ("", True)]
    tokenizer = llama_like()
    stream = open_stream(tokenizer, ("lo",))
    stream.prime([id_of(tokenizer, "lo"), id_of(tokenizer, "é")])
    assert stream.flush() == ""


def test_flush_returns_the_begun_stop_string_once() -> None:
    tokenizer = llama_like()
    stream = open_stream(tokenizer, ("stop",))
    assert stream.push(id_of(tokenizer, "▁st")).text == ""
    assert stream.flush() == "st"
    assert stream.flush() == ""


def test_flush_when_the_replaced_bytes_complete_a_stop_string_cuts_before_it() -> None:
    tokenizer = byte_level()
    stream = open_stream(tokenizer, ("x�",))
    stream.prime(byte_ids(tokenizer, b"yx\xe4"))
    assert stream.flush() == ""
    again = open_stream(tokenizer, ("x�",))
    assert [again.push(token_id).text for token_id in byte_ids(tokenizer, b"yx\xe4")] == ["y", "", ""]


@pytest.mark.parametrize(("special", "expected"), [(False, "Hello"), (True, "<s> Hello</s>")])
def test_special_tokens_are_in_the_text_only_when_asked_for(special: bool, expected: str) -> None:
    tokenizer = llama_like()
    token_ids = [id_of(tokenizer, token) for token in ("<s>", "▁Hello", "</s>")]
    assert run(open_stream(tokenizer, special=special), token_ids) == expected


def test_stream_after_half_a_surrogate_does_not_wait_for_bytes_that_cannot_come() -> None:
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, stop=(), include_special_tokens=False)
    assert [stream.push(byte).text for byte in b"\xed\xa0\x80a"] == ["", "\ufffd\ufffd", "\ufffd", "a"]
