"""How the two generating endpoints write an answer: the parts that surround the text, and log-probabilities."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvrelay.v1 import sampling_pb2
from router.http.pieces import Piece

LEAST_LOGPROB = -9999.0
"""Told in place of minus infinity, which JSON does not have."""

TokenTexts = Callable[[Sequence[int]], Sequence[str]]
"""The text of each token by itself."""


class Style(Protocol):
    """Of one call: it may remember where in a choice it is."""

    id_prefix: str
    object_name: str
    """Of a whole answer."""
    chunk_name: str
    """Of an event of a stream."""
    text_open: str
    """JSON of an event's choice, from its index to its text …"""
    text_close: str
    """… and behind it."""
    opening: str
    """JSON of a choice, behind its index, in an event before its first text; empty: there is none."""
    prompt_ids_with_choice: bool
    """Whether the prompt's ids are told by each choice, not by the answer."""

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """Return the log-probabilities of a piece; pieces come in order."""

    def choice(self, text: str) -> dict[str, Any]:
        """Return the members of a complete choice that hold its text."""


class CompletionStyle:
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"
    text_open = ',"text":'
    text_close = ""
    opening = ""
    prompt_ids_with_choice = True

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._lengths: dict[int, int] = {}

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """Return parallel lists; what was echoed comes first."""
        offset = self._lengths.get(piece.index, 0)
        tokens: list[str] = []
        chosen: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        prompt = piece.prompt
        if prompt is not None and prompt.echo is not None:
            tokens += self._texts(prompt.token_ids)
            for text, position in zip(tokens, _padded(prompt.logprobs, len(tokens)), strict=True):
                offsets.append(offset)
                offset += len(text)
                chosen.append(_value(position.chosen) if position.HasField("chosen") else None)
                tops.append(self._top(position) if position.HasField("chosen") else None)
            offset = len(prompt.echo)
        for token in piece.tokens:
            tokens += self._texts([token.token_id])
            offsets.append(offset)
            offset += len(token.text)
            chosen.append(_value(token.logprobs.chosen))
            tops.append(self._top(token.logprobs))
        self._lengths[piece.index] = offset
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def choice(self, text: str) -> dict[str, Any]:
        """Return the text."""
        return {"text": text}

    def _top(self, position: sampling_pb2.PositionLogprobs) -> dict[str, float]:
        entries = [position.chosen, *position.top]
        texts = self._texts([entry.token_id for entry in entries])
        return {text: _value(entry) for text, entry in zip(texts, entries, strict=True)}


class ChatStyle:
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    text_open = ',"delta":{"content":'
    text_close = "}"
    opening = ',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
    prompt_ids_with_choice = False

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """Return an entry for each token."""
        content = [
            {
                **self._entry(token.logprobs.chosen),
                "top_logprobs": [self._entry(entry) for entry in token.logprobs.top],
            }
            for token in piece.tokens
        ]
        return {"content": content, "refusal": None}

    def choice(self, text: str) -> dict[str, Any]:
        """Return the assistant's message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _entry(self, entry: sampling_pb2.TokenLogprob) -> dict[str, Any]:
        (text,) = self._texts([entry.token_id])
        is_whole = "\N{REPLACEMENT CHARACTER}" not in text  # part of a character has no text, and we no bytes of it
        return {"token": text, "logprob": _value(entry), "bytes": list(text.encode()) if is_whole else None}


def _value(entry: sampling_pb2.TokenLogprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def _padded(positions: Sequence[sampling_pb2.PositionLogprobs], length: int) -> Sequence[sampling_pb2.PositionLogprobs]:
    """Return one entry a token: nothing is told of a prompt of one token, which nothing precedes."""
    return positions or [sampling_pb2.PositionLogprobs()] * length
