"""engine.text against whole decodes, for every kind of vocabulary of a checkpoint."""

import functools
from collections.abc import Callable, Sequence
from itertools import takewhile

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.fake_tokenizer import NUM_BYTES, byte_tokenizer
from common.model_files import default_model_dir
from engine.text import TextDelta, TextStream

CORPUS = [
    "Hello world, the stop is here.",
    "naïve café – 东京都 こんにちは 😀😀 👩‍👩‍👧 Ω≈ç√ ﷽",
    "END. \n\nUser: stop stopping",
] * 3
Make = Callable[[], tokenizers.Tokenizer]
FALLBACK_PIECES = ["<unk>", "<s>", "</s>", "▁", "▁▁", "▁Hello", "▁a", "lo", "é", "stop", "▁st", "op", "s", "\n", "�"]


@functools.cache
def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["two words", "naïve"])
    return tokenizer


def byte_fallback(decoder: tokenizers.decoders.Decoder | None) -> tokenizers.Tokenizer:
    pieces = [*FALLBACK_PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    return tokenizer


_GEMMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def fallback_like(decoder: tokenizers.decoders.Decoder | None) -> Make:
    """Return what makes the tokenizer once."""
    return functools.cache(functools.partial(byte_fallback, decoder))


gemma_like = fallback_like(decoders.Sequence(_GEMMA))
llama_like = fallback_like(decoders.Sequence([*_GEMMA, decoders.Strip(" ", 1, 0)]))
metaspace_with_fallback = fallback_like(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
metaspace = fallback_like(decoders.Metaspace())
undecorated = fallback_like(None)


@functools.cache
def wordpiece() -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["[UNK]", "play", "##ing", "##ed", ",", "the", "é", "don", "'", "t"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@functools.cache
def default_model() -> tokenizers.Tokenizer:
    path = default_model_dir() / "tokenizer.json"
    if not path.is_file():
        pytest.skip("the default model has not been fetched")
    return tokenizers.Tokenizer.from_file(str(path))


BYTE_LEVEL = [byte_level, pytest.param(default_model, marks=pytest.mark.model)]
FALLBACK = [
    pytest.param(llama_like, id="llama_like"),
    pytest.param(gemma_like, id="gemma_like"),
    pytest.param(metaspace_with_fallback, id="metaspace_with_fallback"),
]
TEXT_ONLY = [
    pytest.param(metaspace, id="metaspace"),
    wordpiece,
    pytest.param(undecorated, id="undecorated"),
]
STOPS = [(), ("stop",), ("\n\n",), ("stop", "top is", "o"), ("aab", "aabaaab"), (" a a", "😀😀", "é"), ("�",)]
BYTE_PIECES = [byte_tokenizer().id_to_token(byte) or "" for byte in range(NUM_BYTES)]
# Bytes that could complete a character, and one that cannot.
COMPLETIONS = [b"A", *(bytes([first, 0x80, 0x80])[:n] for first in (0x80, 0x90, 0xA0, 0xBF) for n in (1, 2, 3))]

relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@functools.cache
def vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    """Return the number of its tokens, which it counts anew each time."""
    return tokenizer.get_vocab_size()


def open_stream(tokenizer: tokenizers.Tokenizer, stop: Sequence[str] = (), *, special: bool = False) -> TextStream:
    return TextStream(tokenizer, stop=tuple(stop), include_special_tokens=special)


def run(stream: TextStream, token_ids: Sequence[int]) -> str:
    """Return all text as a worker reads it: up to the stop, else with the flushed rest."""
    text = ""
    for token_id in token_ids:
        delta = stream.push(token_id)
        text += delta.text
        if delta.stopped:
            return text
    return text + stream.flush()


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


def id_of(tokenizer: tokenizers.Tokenizer, piece: str) -> int:
    found = tokenizer.token_to_id(piece)
    assert found is not None, piece
    return found


def byte_ids(tokenizer: tokenizers.Tokenizer, raw: bytes) -> list[int]:
    """Return tokens that spell bytes one by one."""
    if tokenizer.token_to_id("<0x00>") is not None:
        return [id_of(tokenizer, f"<0x{byte:02X}>") for byte in raw]
    return [id_of(tokenizer, BYTE_PIECES[byte]) for byte in raw]


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
