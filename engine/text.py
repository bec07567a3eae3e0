"""From tokens to text as it streams: complete characters only, and nothing that may still become a stop string.

Three steps, each with a state of a few bytes or characters, so that a token costs the same at the end of a long answer:

1. a token becomes bytes (byte-level vocabularies, `<0xE4>` tokens) or text (everything else; a piece depends at most on
   the token before it, so the tokenizer's own decoder is asked about the two)
2. bytes become characters once these are complete
3. characters wait while they are the beginning of a stop string

All that comes out is a pure function of the tokens that went in. So a stream that another worker primes with the same
tokens goes on with exactly the text that the first one would have emitted.
"""

import codecs
import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_REPLACE_EACH_BYTE = "kvrelay.replace_each_byte"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Text that became certain with a token."""

    text: str
    stopped: bool
    """A stop string is complete; `text` ends before it and is the last of the sample."""


class TextStream:
    """The text of one sample. Not thread-safe.

    Deltas and flush together are `tokenizer.decode` of all tokens, up to the first stop string: the one that is
    complete first, the longest of those complete at the same character. One difference is deliberate: where a
    vocabulary spells characters in `<0x..>` tokens and a run of these is not valid UTF-8, `decode` replaces every byte
    of the run; here the valid characters in it are kept, since they have been sent before anybody could know.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, stop: tuple[str, ...], include_special_tokens: bool) -> None:
        """Start with no tokens. The tokenizer must not get new tokens from now on; stop strings are not empty."""
        vocabulary = _vocabulary_of(tokenizer)
        hidden = frozenset[int]() if include_special_tokens else vocabulary.special_token_ids
        self._characters = _Characters(vocabulary, hidden)
        self._stops = _StopScanner(stop)
        self._is_over = False

    def push(self, token_id: int) -> TextDelta:
        """Take the next token and return the text that it makes certain. After a stop string nothing comes any more."""
        if self._is_over:
            return TextDelta(text="", stopped=True)
        delta = self._stops.push(self._characters.push(token_id))
        self._is_over = delta.stopped
        return delta

    def prime(self, token_ids: Iterable[int]) -> None:
        """Take tokens whose text has been delivered already."""
        for token_id in token_ids:
            self.push(token_id)

    def flush(self) -> str:
        """Return the text held back, when the sample ends for another reason than a stop string. Ends the stream."""
        if self._is_over:
            return ""
        self._is_over = True
        delta = self._stops.push(self._characters.flush())
        return delta.text if delta.stopped else delta.text + self._stops.held


class _Characters:
    """Turns tokens into complete characters."""

    def __init__(self, vocabulary: "_Vocabulary", hidden_token_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._hidden_token_ids = hidden_token_ids
        self._previous_token_id: int | None = None
        self._utf8 = codecs.getincrementaldecoder("utf-8")(vocabulary.on_invalid_bytes)

    def push(self, token_id: int) -> str:
        """Return the characters that the token completes."""
        if token_id in self._hidden_token_ids or not self._vocabulary.has(token_id):
            return ""  # `decode` drops these before anything else; even the bytes around them join
        previous, self._previous_token_id = self._previous_token_id, token_id
        raw = self._vocabulary.bytes_of(token_id)
        if raw is None or (previous is None and self._vocabulary.is_whole_character(raw)):
            return self.flush() + self._vocabulary.text_after(previous, token_id)
        return self._utf8.decode(raw) + self._hopeless()

    def _hopeless(self) -> str:
        """Return what pending bytes become that no byte can complete: the decoder keeps halves of surrogates back."""
        pending = self._utf8.getstate()[0]
        is_surrogate = len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0
        return self.flush() if is_surrogate else ""

    def flush(self) -> str:
        """Return what an incomplete character becomes when no more bytes follow."""
        return self._utf8.decode(b"", final=True)


class _Vocabulary:
    """What a tokenizer's decoder does to single tokens. Remembers its answers."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._is_byte_level = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
        self._has_byte_fallback = "ByteFallback" in kinds
        self._bytes: dict[int, bytes | None] = {}
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.on_invalid_bytes = "replace" if self._is_byte_level else _REPLACE_EACH_BYTE

    def has(self, token_id: int) -> bool:
        """Whether there is such a token."""
        return token_id in self._bytes or self._tokenizer.id_to_token(token_id) is not None

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that a token stands for; None when it stands for text."""
        if token_id not in self._bytes:
            token = self._tokenizer.id_to_token(token_id)
            assert token is not None, f"token {token_id} is not in the vocabulary"
            self._bytes[token_id] = self._read_bytes(token)
        return self._bytes[token_id]

    def is_whole_character(self, raw: bytes) -> bool:
        """Whether a byte token needs no other one; as the first token the decoder may strip it (a space)."""
        return self._has_byte_fallback and raw[0] < 0x80

    def text_after(self, previous_token_id: int | None, token_id: int) -> str:
        """Return what a text token adds to the text: a leading space may go, or come, with what is before it."""
        if previous_token_id is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        before = self._tokenizer.decode([previous_token_id], skip_special_tokens=False)
        both = self._tokenizer.decode([previous_token_id, token_id], skip_special_tokens=False)
        return both[len(before) :]

    def _read_bytes(self, token: str) -> bytes | None:
        if self._is_byte_level:
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        spelled = _BYTE_TOKEN.fullmatch(token) if self._has_byte_fallback else None
        return bytes.fromhex(spelled[1]) if spelled else None


class _StopScanner:
    """Holds text back while it is the beginning of a stop string: one Knuth-Morris-Pratt automaton per stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._num_matched = [0] * len(stops)  # per stop string: how much of its beginning ends the text so far
        self.held = ""
        """Text seen and not returned: as long as the longest of these beginnings."""

    def push(self, text: str) -> TextDelta:
        """Return what is certain now. After a stop the scanner is of no more use."""
        if not self._stops:
            return TextDelta(text=text, stopped=False)
        seen = self.held + text
        for end, char in enumerate(text, start=len(self.held) + 1):
            longest = self._advance(char)
            if longest:
                return TextDelta(text=seen[: end - longest], stopped=True)
        num_certain = len(seen) - max(self._num_matched)
        self.held = seen[num_certain:]
        return TextDelta(text=seen[:num_certain], stopped=False)

    def _advance(self, char: str) -> int:
        """Take one character; return the length of the longest stop string that is complete with it, else 0."""
        longest = 0
        for i, (stop, failure) in enumerate(self._stops):
            matched = self._num_matched[i]
            while matched and stop[matched] != char:
                matched = failure[matched]
            matched += stop[matched] == char
            self._num_matched[i] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest


def _failure_table(stop: str) -> list[int]:
    """Return, for each n below len(stop), the length of the longest proper beginning of stop[:n] that also ends it."""
    table = [0] * max(2, len(stop))
    for n in range(2, len(stop)):
        matched = table[n - 1]
        while matched and stop[matched] != stop[n - 1]:
            matched = table[matched]
        table[n] = matched + (stop[matched] == stop[n - 1])
    return table


def _decoder_kinds(tokenizer: tokenizers.Tokenizer) -> set[str]:
    """Return the types of the decoders that a tokenizer chains."""
    if tokenizer.decoder is None:
        return set()
    described = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in described.get("decoders", [described])}


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte behind each character of a byte-level vocabulary: printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError), error
    return _REPLACEMENT * (error.end - error.start), error.end


_BYTE_OF_CHAR = _byte_level_alphabet()
# The vocabulary of a tokenizer is read once; few tokenizers live in a process.
_vocabulary_of = functools.lru_cache(maxsize=8)(_Vocabulary)
codecs.register_error(_REPLACE_EACH_BYTE, _replace_each_byte)
