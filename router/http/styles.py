"""Formats of the two generating endpoints: the JSON around the text, and log-probabilities."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from kvrelay.v1 import sampling_pb2
from router.http.pieces import Piece

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

TokenTexts = Callable[[Sequence[int]], Sequence[str]]
"""Returns the text of each token by itself."""


class Style(ABC):
    """Format of one call's answer. May remember the position in each choice."""

    id_prefix: str
    object_name: str
    """Name of a whole answer."""
    chunk_name: str
    """Name of an event of a stream."""
    text_open: str
    """JSON of an event's choice, from its index to its text …"""
    text_close: str
    """… and behind it."""
    opening: str
    """JSON of a choice, behind its index, in an event before its first text; empty for no such event."""
    prompt_ids_with_choice: bool
    """Whether each choice, rather than the answer, holds the prompt's ids."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    @abstractmethod
    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """Return the log-probabilities of a piece; pieces come in order."""

    @abstractmethod
    def choice(self, text: str) -> dict[str, Any]:
        """Return the members of a complete choice that hold its text."""


class CompletionStyle(Style):
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"
    text_open = ',"text":'
    text_close = ""
    opening = ""
    prompt_ids_with_choice = True

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__(texts)
        self._lengths: dict[int, int] = {}

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """Return parallel lists; the echoed prompt comes first."""
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


class ChatStyle(Style):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    text_open = ',"delta":{"content":'
    text_close = "}"
    opening = ',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
    prompt_ids_with_choice = False

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
        is_whole = "\N{REPLACEMENT CHARACTER}" not in text  # the bytes of a partial character are not known
        return {"token": text, "logprob": _value(entry), "bytes": list(text.encode()) if is_whole else None}


def _value(entry: sampling_pb2.TokenLogprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def _padded(positions: Sequence[sampling_pb2.PositionLogprobs], length: int) -> Sequence[sampling_pb2.PositionLogprobs]:
    """Return one entry per token; a prompt of one token has no log-probabilities, since nothing precedes it."""
    return positions or [sampling_pb2.PositionLogprobs()] * length
