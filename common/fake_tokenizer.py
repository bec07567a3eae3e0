"""A tokenizer for the fake engine: one token per byte, so that every text and every cut of it is a valid prompt."""

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

NUM_BYTES = 256
EOS_TOKEN = "<|end|>"
VOCAB_SIZE = NUM_BYTES + 1
EOS_TOKEN_ID = NUM_BYTES


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer whose token id is the byte value; id 256 is the end-of-sequence token."""
    vocab = {char: byte for byte, char in byte_chars().items()}
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
