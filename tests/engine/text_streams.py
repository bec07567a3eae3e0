"""Streams of text over tokenizers with every kind of vocabulary of a checkpoint."""

import functools
from collections.abc import Callable, Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.fake_tokenizer import NUM_BYTES, byte_tokenizer
from common.model_files import default_model_dir
from engine.text.streaming import TextStream

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
BYTE_PIECES = [byte_tokenizer().id_to_token(byte) or "" for byte in range(NUM_BYTES)]


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


def id_of(tokenizer: tokenizers.Tokenizer, piece: str) -> int:
    """Return the token of a piece that must be in the vocabulary."""
    found = tokenizer.token_to_id(piece)
    assert found is not None, piece
    return found


def byte_ids(tokenizer: tokenizers.Tokenizer, raw: bytes) -> list[int]:
    """Return tokens that spell bytes one by one."""
    if tokenizer.token_to_id("<0x00>") is not None:
        return [id_of(tokenizer, f"<0x{byte:02X}>") for byte in raw]
    return [id_of(tokenizer, BYTE_PIECES[byte]) for byte in raw]
