"""Turns tokens into streamed text: complete characters only, and nothing that may still become a stop string.

Stop strings are compared with the content of an answer, not with its thoughts or its calls of tools.

Three steps, each with a state of a few bytes or characters, so that a token costs the same at any length:

1. a token becomes bytes (byte-level vocabularies, `<0xE4>` tokens) or text (all others; a piece depends on the previous
   token at most, so the tokenizer's own decoder decodes the two)
2. bytes become characters once these are complete
3. characters wait while they are the beginning of a stop string, or while it is open whether they are markup

The output is a pure function of the input tokens. So a stream that another worker primes with the same tokens continues
with exactly the text that the first one would have emitted.
"""

import codecs
import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers

from common.chat.deltas import Span
from common.chat.parsing import AnswerFormatLike, MessageParser

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_REPLACE_EACH_BYTE = "kvrelay.replace_each_byte"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Text that became certain with a token."""

    text: str
    stopped: bool
    """Whether a stop string is complete: `text` ends before it and is the last of the sample."""


class TextStream:
    """The text of one sample. Not thread-safe.

    Deltas and flush together equal `tokenizer.decode` of all tokens, up to the first stop string: the one that is
    complete first, or the longest of those complete at the same character. One difference is deliberate: where a run of
    `<0x..>` tokens is not valid UTF-8, `decode` replaces every byte of the run; here the valid characters in it are
    kept, since they were sent before the invalid byte arrived.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        stop: tuple[str, ...],
        include_special_tokens: bool,
        answer_format: AnswerFormatLike | None = None,
    ) -> None:
        """Start with no tokens. The tokenizer must not get new tokens later; stop strings are not empty.

        `answer_format` names the markup within which there are no stop strings.
        """
        vocabulary = _vocabulary_of(tokenizer)
        hidden = frozenset[int]() if include_special_tokens else vocabulary.special_token_ids
        self._characters = _Characters(vocabulary, hidden)
        self._stops = _StopScanner(stop)
        self._parser = MessageParser.of(answer_format) if stop and answer_format is not None else None
        self._is_over = False

    def push(self, token_id: int) -> TextDelta:
        """Take the next token and return the text that it makes certain; none after a stop string."""
        if self._is_over:
            return TextDelta(text="", stopped=True)
        text = self._characters.push(token_id)
        delta = self._stops.push(text) if self._parser is None else self._scan(self._parser.spans(text))
        self._is_over = delta.stopped
        return delta

    def prime(self, token_ids: Iterable[int]) -> None:
        """Take tokens whose text has been delivered already."""
        for token_id in token_ids:
            self.push(token_id)

    def flush(self) -> str:
        """Return the text held back when a sample ends without a stop string. Ends the stream."""
        if self._is_over:
            return ""
        self._is_over = True
        text = self._characters.flush()
        if self._parser is None:
            delta = self._stops.push(text)
        else:
            delta = self._scan([*self._parser.spans(text), *self._parser.last_spans()])
        return delta.text if delta.stopped else delta.text + self._stops.release()

    def _scan(self, spans: Sequence[Span]) -> TextDelta:
        """Return the text that is certain now; no stop string reaches across markup."""
        certain: list[str] = []
        for span in spans:
            if span.is_content:
                delta = self._stops.push(span.text)
                certain.append(delta.text)
                if delta.stopped:
                    return TextDelta(text="".join(certain), stopped=True)
            elif span.text:
                certain += [self._stops.release(), span.text]
        return TextDelta(text="".join(certain), stopped=False)


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
            return ""  # `decode` drops these first; the bytes around them join
        previous, self._previous_token_id = self._previous_token_id, token_id
        raw = self._vocabulary.bytes_of(token_id)
        if raw is None or (previous is None and self._vocabulary.is_whole_character(raw)):
            return self.flush() + self._vocabulary.text_after(previous, token_id)
        return self._utf8.decode(raw) + self._hopeless()

    def _hopeless(self) -> str:
        """Return the replacement of pending bytes that no byte can complete: the decoder holds back half surrogates."""
        pending = self._utf8.getstate()[0]
        is_surrogate = len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0
        return self.flush() if is_surrogate else ""

    def flush(self) -> str:
        """Return the replacement of an incomplete character when no more bytes follow."""
        return self._utf8.decode(b"", final=True)


class _Vocabulary:
    """A tokenizer's decoding of single tokens, memoised."""

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
        """Whether the vocabulary has this token."""
        return token_id in self._bytes or self._tokenizer.id_to_token(token_id) is not None

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that a token spells; None when it spells text."""
        if token_id not in self._bytes:
            token = self._tokenizer.id_to_token(token_id)
            assert token is not None, f"token {token_id} is not in the vocabulary"
            self._bytes[token_id] = self._read_bytes(token)
        return self._bytes[token_id]

    def is_whole_character(self, raw: bytes) -> bool:
        """Whether a byte token is a whole character; as the first token the decoder may strip it (a space)."""
        return self._has_byte_fallback and raw[0] < 0x80

    def text_after(self, previous_token_id: int | None, token_id: int) -> str:
        """Return the text that a token adds: its leading space may depend on the previous token."""
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
        self._num_matched = [0] * len(stops)  # per stop string: length of its beginning that ends the text so far
        self._held = ""  # text that was not returned yet: the longest of these beginnings

    def push(self, text: str) -> TextDelta:
        """Return the text that is certain now. Not to be called after a stop."""
        if not self._stops:
            return TextDelta(text=text, stopped=False)
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            longest = self._advance(char)
            if longest:
                return TextDelta(text=seen[: end - longest], stopped=True)
        num_certain = len(seen) - max(self._num_matched)
        self._held = seen[num_certain:]
        return TextDelta(text=seen[:num_certain], stopped=False)

    def release(self) -> str:
        """Return the text held back, and begin anew."""
        held, self._held = self._held, ""
        self._num_matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> int:
        """Take one character; return the length of the longest stop string that it completes, else 0."""
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
    """Return the byte of each character of a byte-level vocabulary: printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError), error
    return _REPLACEMENT * (error.end - error.start), error.end


_BYTE_OF_CHAR = _byte_level_alphabet()
# A process has few tokenizers; the vocabulary of each is read once.
_vocabulary_of = functools.lru_cache(maxsize=8)(_Vocabulary)
codecs.register_error(_REPLACE_EACH_BYTE, _replace_each_byte)
