"""Formats of the two generating endpoints: the JSON around the text, and log-probabilities."""

import base64
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from common.chat.deltas import ParsedDelta, ToolCallDelta, joined, whole_calls
from common.chat.parsing import MessageParser, has_markup
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2
from router.http.json_parts import PART_VALUES, quote
from router.http.pieces import Piece, Prompt
from router.record.record import Job

EMPTY_DELTA = ',"delta":{}'
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
    """JSON of an event's choice from its index up to its text."""
    text_close: str
    """JSON of an event's choice after its text."""
    opening: str
    """JSON that follows a choice's index in the event before its first text; empty: the style has no such event."""
    prompt_ids_with_choice: bool
    """Whether each choice, rather than the answer, holds the prompt's ids."""

    is_parsed: bool = False
    """Whether the text has parts that go out under other names."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    @property
    def ends_in_calls(self) -> bool:
        """Whether a choice has ended with calls of tools."""
        return False

    def open(self, job: Job) -> None:  # noqa: B027 - most have nothing to do
        """Begin the answer to a request."""

    def read(self, piece: Piece) -> None:  # noqa: B027 - as above
        """Take the next piece of a choice that is answered as a whole, so that its end has little left to do."""

    def event(self, piece: Piece) -> str | None:
        """Return the JSON of an event's choice, from its index to its log-probabilities; None for nothing yet."""
        return f"{self.text_open}{quote(piece.text)}{self.text_close}"

    def finish_reason(self, piece: Piece) -> str | None:
        """Return why the choice ended; after the piece's `event` or `choice`."""
        return piece.finish_reason

    @abstractmethod
    def logprobs(self, piece: Piece) -> Iterator[dict[str, list[Any] | None]]:
        """Yield the log-probabilities of a piece in slices of the same members, at least one; pieces come in order."""

    def prompt_logprobs(self, prompt: Prompt) -> Iterator[list[dict[str, Any] | None]]:
        """Yield those of each token of a prompt by id, in slices; None for the first token, which nothing precedes."""
        positions = _padded(prompt.logprobs, len(prompt.token_ids))
        for start, end in _slices(len(positions), positions[-1:]):
            yield [self._by_id(each) if each.HasField("chosen") else None for each in positions[start:end]]

    def _by_id(self, position: sampling_pb2.PositionLogprobs) -> dict[str, Any]:
        """Return the token of a position, then the most probable ones; one that is not among those has no rank."""
        ranks = {entry.token_id: rank for rank, entry in enumerate(position.top, 1)}
        entries = {entry.token_id: entry for entry in (position.chosen, *position.top)}
        return {
            str(token_id): {"logprob": _value(entry), "rank": ranks.get(token_id), "decoded_token": text}
            for (token_id, entry), text in zip(entries.items(), self._texts(list(entries)), strict=True)
        }

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
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

    def logprobs(self, piece: Piece) -> Iterator[dict[str, list[Any] | None]]:
        """Yield parallel lists; the echoed prompt comes first."""
        prompt = piece.prompt
        if prompt is not None and prompt.echo is not None:
            positions = _padded(prompt.logprobs, len(prompt.token_ids))
            for start, end in _slices(len(positions), positions[-1:]):
                texts = self._texts(prompt.token_ids[start:end])
                yield self._lists(piece.index, texts, texts, positions[start:end])
            self._lengths[piece.index] = len(prompt.echo)
        for start, end in _slices(len(piece.tokens), [token.logprobs for token in piece.tokens[:1]]):
            tokens = piece.tokens[start:end]
            texts = self._texts([token.token_id for token in tokens])
            yield self._lists(
                piece.index, texts, [token.text for token in tokens], [token.logprobs for token in tokens]
            )

    def _lists(
        self,
        index: int,
        texts: Sequence[str],
        written: Sequence[str],
        positions: Sequence[sampling_pb2.PositionLogprobs],
    ) -> dict[str, list[Any] | None]:
        """Return the lists for tokens whose text in the answer is `written`."""
        offsets = list(accumulate(map(len, written), initial=self._lengths.get(index, 0)))
        self._lengths[index] = offsets.pop()
        known = [position if position.HasField("chosen") else None for position in positions]
        return {
            "tokens": list(texts),
            "token_logprobs": [None if position is None else _value(position.chosen) for position in known],
            "top_logprobs": [None if position is None else self._top(position) for position in known],
            "text_offset": offsets,
        }

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return the text."""
        return {"text": piece.text}

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

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__(texts)
        self._format = pb.AnswerFormat()
        self._request_id = ""
        self._parsers: dict[int, MessageParser] = {}
        self._deltas: dict[int, list[ParsedDelta]] = {}
        """Deltas of the pieces of whole choices, by choice."""

    @property
    def ends_in_calls(self) -> bool:
        """See `Style`."""
        return any(parser.ends_in_calls for parser in self._parsers.values())

    def open(self, job: Job) -> None:
        """Begin the answer; its text is parsed where it may hold calls of tools or reasoning."""
        self._request_id = job.request_id
        if job.answer_format is not None:
            self._format = job.answer_format
            self.is_parsed = has_markup(self._format)

    def read(self, piece: Piece) -> None:
        """Parse the next piece of a choice."""
        if self.is_parsed:
            self._deltas.setdefault(piece.index, []).append(self._parse(piece))

    def event(self, piece: Piece) -> str | None:
        """Return the delta of the assistant's message."""
        if not self.is_parsed:
            return super().event(piece)
        delta = self._parse(piece)
        found: dict[str, Any] = {}
        if delta.reasoning:
            found |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
        if delta.content:
            found["content"] = delta.content
        if delta.tool_calls:
            found["tool_calls"] = [self._call_delta(piece.index, call) for call in delta.tool_calls]
        return f',"delta":{quote(found)}' if found or piece.finish_reason else None

    def finish_reason(self, piece: Piece) -> str | None:
        """Return why the choice ended; the model's own end after calls that are whole has a name of its own."""
        parser = self._parsers.get(piece.index)
        has_calls = parser is not None and parser.ends_in_calls
        return "tool_calls" if has_calls and piece.finish_reason == "stop" else piece.finish_reason

    def logprobs(self, piece: Piece) -> Iterator[dict[str, list[Any] | None]]:
        """Yield an entry for each token."""
        for start, end in _slices(len(piece.tokens), [token.logprobs for token in piece.tokens[:1]]):
            yield {"content": logprob_entries(piece.tokens[start:end], self._texts), "refusal": None}

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return the assistant's message."""
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if self.is_parsed:
            delta = joined(self._deltas[piece.index])
            message["content"] = delta.content or (None if delta.tool_calls else "")
            if delta.reasoning:
                message |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
            if delta.tool_calls:
                message["tool_calls"] = self._calls(piece.index, delta.tool_calls)
        return {"message": message}

    def _parse(self, piece: Piece) -> ParsedDelta:
        """Return what the piece adds to the message of its choice."""
        parser = self._parsers.get(piece.index)
        if parser is None:
            parser = self._parsers[piece.index] = MessageParser.of(self._format)
        return parser.push(piece.text, is_last=piece.finish_reason is not None)

    def _call_delta(self, index: int, call: ToolCallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "index": call.index,
            "id": call_id(self._request_id, index, call.index),
            "type": "function",
            "function": function,
        }

    def _calls(self, index: int, deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
        """Return the complete calls of a choice."""
        return [
            {
                "id": call_id(self._request_id, index, position),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for position, (name, arguments) in enumerate(whole_calls(deltas))
        ]


def logprob_entries(tokens: Sequence[sampling_pb2.SampleToken], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return the log-probabilities of each token in the form of chats."""

    def entry_of(entry: sampling_pb2.TokenLogprob) -> dict[str, Any]:
        (text,) = texts([entry.token_id])
        is_whole = "\N{REPLACEMENT CHARACTER}" not in text  # the bytes of a partial character are not known
        return {"token": text, "logprob": _value(entry), "bytes": list(text.encode()) if is_whole else None}

    return [
        {**entry_of(token.logprobs.chosen), "top_logprobs": [entry_of(entry) for entry in token.logprobs.top]}
        for token in tokens
    ]


def call_id(request_id: str, index: int, call_idx: int) -> str:
    """Return the id of a call in an answer: nine letters and digits, which is what Mistral's template wants."""
    digest = hashlib.blake2b(f"{request_id}/{index}/{call_idx}".encode(), digest_size=6).digest()
    return base64.b32encode(digest).decode().lower()[:9]


def _slices(length: int, like: Sequence[sampling_pb2.PositionLogprobs]) -> Iterator[tuple[int, int]]:
    """Yield beginnings and ends of slices that become JSON within some milliseconds; `like`: one of the positions."""
    step = max(1, PART_VALUES // sum(2 + 2 * len(position.top) for position in like)) if like else 1
    for start in range(0, max(length, 1), step):
        yield start, min(start + step, length)


def _value(entry: sampling_pb2.TokenLogprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def _padded(positions: Sequence[sampling_pb2.PositionLogprobs], length: int) -> Sequence[sampling_pb2.PositionLogprobs]:
    """Return one entry per token; a prompt of one token has no log-probabilities, since nothing precedes it."""
    return positions or [sampling_pb2.PositionLogprobs()] * length
