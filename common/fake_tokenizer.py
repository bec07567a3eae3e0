"""Tokenizers without a training corpus, for the fake engine and for random weights. Both read text as bytes.

One token per byte: every text, and every part of one, is a valid prompt.
"""

import functools
from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

NUM_BYTES = 256
EOS_TOKEN = "<|end|>"
VOCAB_SIZE = NUM_BYTES + 1
EOS_TOKEN_ID = NUM_BYTES


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer whose token id is the byte value; id 256 is the end-of-sequence token."""
    return _byte_level({})


def generated_tokenizer(vocab_size: int, *, eos_token_id: int) -> tokenizers.Tokenizer:
    """Return a tokenizer that reads text as bytes (ids below 256) and writes every other id as a word of its own."""
    words = {_word(token_id): token_id for token_id in range(NUM_BYTES, vocab_size) if token_id != eos_token_id}
    return _byte_level(words | {EOS_TOKEN: eos_token_id})


def _byte_level(further: Mapping[str, int]) -> tokenizers.Tokenizer:
    vocab = {char: byte for byte, char in byte_chars().items()} | dict(further)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TOKEN])
    return tokenizer


@functools.cache
def byte_chars() -> dict[int, str]:
    """Return the printable stand-in that byte-level BPE uses for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    chars = {byte: chr(byte) for byte in printable}
    shifted = 0
    for byte in range(NUM_BYTES):
        if byte not in chars:
            chars[byte] = chr(NUM_BYTES + shifted)
            shifted += 1
    return chars


def _word(token_id: int) -> str:
    """Return a space and syllables that spell the id to base 75, as a byte-level vocabulary writes them."""
    syllables = ""
    while token_id:
        token_id, digit = divmod(token_id, 75)
        syllables = "bcdfghjklmnprst"[digit % 15] + "aeiou"[digit // 15] + syllables
    return f"{byte_chars()[ord(' ')]}{syllables}"
