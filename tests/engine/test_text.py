"""engine.text against whole decodes, for every kind of vocabulary of a checkpoint."""

import functools
from collections.abc import Sequence
from itertools import takewhile

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.engine.text_streams import (
    BYTE_LEVEL,
    BYTE_PIECES,
    CORPUS,
    FALLBACK,
    FALLBACK_PIECES,
    TEXT_ONLY,
    Make,
    byte_ids,
    default_model,
    id_of,
    open_stream,
    run,
)

STOPS = [(), ("stop",), ("\n\n",), ("stop", "top is", "o"), ("aab", "aabaaab"), (" a a", "😀😀", "é"), ("�",)]
# Bytes that could complete a character, and one that cannot.
COMPLETIONS = [b"A", *(bytes([first, 0x80, 0x80])[:n] for first in (0x80, 0x90, 0xA0, 0xBF) for n in (1, 2, 3))]

relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@functools.cache
def vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    """Return the number of its tokens, which it counts anew each time."""
    return tokenizer.get_vocab_size()


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text before the stop string that ends first, of equals the longest."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not found:
        return text
    end, minus_length = min(found)
    return text[: end + minus_length]


def without_begun_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text without its longest ending that begins a stop string."""
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(begun, default=0)]


@functools.cache
def completions(tokenizer: tokenizers.Tokenizer) -> list[list[int]]:
    """Return the tokens of COMPLETIONS."""
    return [byte_ids(tokenizer, raw) for raw in COMPLETIONS]


def certain_text(tokenizer: tokenizers.Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the common beginning of all continuations of the tokens."""
    decoded = [tokenizer.decode([*token_ids, *more]) for more in completions(tokenizer)]
    shared = takewhile(lambda chars: len(set(chars)) == 1, zip(*decoded, strict=False))
    return "".join(chars[0] for chars in shared)


@pytest.mark.parametrize("make", BYTE_LEVEL)
@pytest.mark.parametrize("special", [False, True])
@given(data=st.data())
@relaxed
def test_stream_of_any_byte_level_tokens_equals_the_decode_up_to_the_stop(
    make: Make, special: bool, data: st.DataObject
) -> None:
    tokenizer = make()
    some_ids = st.integers(0, vocab_size(tokenizer) + 3) | st.sampled_from(tokenizer.encode(CORPUS[1]).ids)
    token_ids = data.draw(st.lists(some_ids, max_size=40))
    stops = data.draw(st.sampled_from(STOPS))
    whole = tokenizer.decode(token_ids, skip_special_tokens=not special)
    assert run(open_stream(tokenizer, stops, special=special), token_ids) == cut(whole, stops)


@pytest.mark.parametrize("make", BYTE_LEVEL)
@given(data=st.data())
@relaxed
def test_stream_has_emitted_exactly_what_is_certain_after_each_byte_level_token(
    make: Make, data: st.DataObject
) -> None:
    tokenizer = make()
    raw = data.draw(st.text(max_size=6).map(str.encode) | st.binary(max_size=12))
    token_ids = byte_ids(tokenizer, bytes(b for b in raw if tokenizer.token_to_id(BYTE_PIECES[b]) is not None))
    stops = data.draw(st.sampled_from([(), ("AA",), ("é\x80", "😀")]))
    stream, emitted = open_stream(tokenizer, stops), ""
    for n, token_id in enumerate(token_ids, start=1):
        delta = stream.push(token_id)
        emitted += delta.text
        certain = certain_text(tokenizer, token_ids[:n])
        if delta.stopped:
            assert emitted == cut(certain, stops) != certain
            break
        assert emitted == without_begun_stop(certain, stops)


@pytest.mark.parametrize("make", FALLBACK)
@given(
    items=st.lists(
        st.sampled_from(FALLBACK_PIECES) | st.characters(codec="utf-8").map(lambda char: f"byte:{char}"), max_size=30
    ),
    stops=st.sampled_from(STOPS),
)
@example(items=["byte: ", "▁a"], stops=())
@example(items=["▁", "▁", "▁a"], stops=())
@example(items=["<s>", "▁Hello"], stops=())
@example(items=["byte:é", "<s>", "byte:é"], stops=())
@relaxed
def test_stream_of_valid_byte_fallback_tokens_equals_the_decode_up_to_the_stop(
    make: Make, items: list[str], stops: tuple[str, ...]
) -> None:
    tokenizer = make()
    token_ids: list[int] = []
    for item in items:
        spelled = item.removeprefix("byte:")
        token_ids += byte_ids(tokenizer, spelled.encode()) if spelled != item else [id_of(tokenizer, item)]
    assert run(open_stream(tokenizer, stops), token_ids) == cut(tokenizer.decode(token_ids), stops)


@pytest.mark.parametrize("make", TEXT_ONLY)
@given(data=st.data())
@relaxed
def test_stream_of_any_text_tokens_equals_the_decode_up_to_the_stop(make: Make, data: st.DataObject) -> None:
    tokenizer = make()
    token_ids = data.draw(st.lists(st.integers(0, min(14, vocab_size(tokenizer) - 1)), max_size=30))
    stops = data.draw(st.sampled_from(STOPS))
    assert run(open_stream(tokenizer, stops), token_ids) == cut(tokenizer.decode(token_ids), stops)


@pytest.mark.parametrize("make", [*BYTE_LEVEL, *FALLBACK, *TEXT_ONLY])
@given(data=st.data())
@relaxed
def test_stream_primed_with_any_beginning_continues_with_the_same_deltas(make: Make, data: st.DataObject) -> None:
    tokenizer = make()
    token_ids = data.draw(st.lists(st.integers(0, vocab_size(tokenizer) - 1), max_size=30))
    num_before = data.draw(st.integers(0, len(token_ids)))
    stops = data.draw(st.sampled_from(STOPS))
    uninterrupted, resumed = open_stream(tokenizer, stops), open_stream(tokenizer, stops)
    for token_id in token_ids[:num_before]:
        uninterrupted.push(token_id)
    resumed.prime(token_ids[:num_before])
    rest = token_ids[num_before:]
    assert [resumed.push(token_id) for token_id in rest] == [uninterrupted.push(token_id) for token_id in rest]
    assert resumed.flush() == uninterrupted.flush()


@pytest.mark.model
def test_stream_of_the_default_models_multilingual_text_returns_the_text() -> None:
    tokenizer = default_model()
    text = "".join(CORPUS)
    token_ids = tokenizer.encode(text).ids
    stream = open_stream(tokenizer)
    deltas = [stream.push(token_id).text for token_id in token_ids]
    assert "".join(deltas) == text
    assert stream.flush() == ""
    assert "�" not in text
