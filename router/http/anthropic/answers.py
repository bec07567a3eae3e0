"""The answer to a call of `/v1/messages`: written event by event, or collected and written at its end."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from common.ids import RequestId
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.sampling_pb2 import FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, FinishReason
from router.doors.front_door import FrontDoor
from router.http.answers import Answer, MakeAnswer
from router.http.anthropic.cache_control import creation_by_ttl
from router.http.anthropic.stops import Decode, StopFinder
from router.http.blocks import Block, BlockChange, BlockDelta, BlockKind, Blocks, BlockStart, BlockStop
from router.http.calls import Call
from router.http.exchange import Exchange
from router.http.json_parts import quote
from router.http.styles import TokenTexts
from router.record.record import Job

ID_PREFIX = "msg_"
SIGNATURE = "unsigned"
"""Signature of all thoughts. Not empty, since some clients drop thoughts without one; nothing reads it."""
INVALID_INPUT = "INVALID_JSON"
"""The one member of a call's input that is not a JSON object: the text as the model wrote it."""

_DELTAS: Mapping[BlockKind, tuple[str, str]] = {
    BlockKind.THINKING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.TOOL_USE: ("input_json_delta", "partial_json"),
}
"""Type of the event's delta for more text of a block, and its member."""


def message_answers(door: FrontDoor) -> MakeAnswer:
    """Return the factory of answers, as events or as one document."""

    def make(call: Call, texts: TokenTexts, exchange: Exchange, answer_id: RequestId) -> Answer:
        kind = StreamedMessage if call.is_streamed else GatheredMessage
        return kind(call, exchange, decode=door.reader.codec.decode, answer_id=answer_id)

    return make


class _MessageAnswer(Answer):
    """An answer of content blocks, to a call of one request and one sample."""

    def __init__(self, call: Call, exchange: Exchange, *, decode: Decode, answer_id: RequestId) -> None:
        super().__init__(call, exchange)
        self._decode = decode
        self._id = ID_PREFIX + answer_id
        self._model = ""
        self._finish_reason: FinishReason.ValueType = FINISH_REASON_UNSPECIFIED
        self._stop_sequence: str | None = None

    def open(self, position: int, job: Job, echo: str | None) -> None:
        """Begin the request."""
        assert job.answer_format is not None, "a conversation has a format of its answer"
        self._model = job.model.name
        self._blocks = Blocks(job.answer_format, request_id=job.request_id)
        self._stops = StopFinder(job.sampling.stop, self._decode)

    async def take(self, position: int, delta: pb.TokenDelta) -> None:
        """Read new tokens."""
        for token in () if self._call.wants_only_echo else delta.tokens:
            self._stops.push(token)
            self._blocks.push(token.text)
            if token.finish_reason:
                self._finish_reason = token.finish_reason
                self._blocks.finish()
        if self._finish_reason == FINISH_REASON_STOP:
            self._stop_sequence = self._stops.find()
        await self._send(self._blocks.take())

    @property
    def ends_in_calls(self) -> bool:
        """See `Answer`."""
        return self._stop_reason() == "tool_use"

    @abstractmethod
    async def _send(self, changes: Sequence[BlockChange]) -> None:
        """Take changes of the blocks."""

    def _message(self, **members: Any) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, **members}

    def _end(self) -> dict[str, Any]:
        """Return why the answer ended."""
        return {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence}

    def _stop_reason(self) -> str:
        if self._finish_reason != FINISH_REASON_STOP:
            return "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.end_in_calls else "end_turn"

    def _usage(self) -> dict[str, Any]:
        """Return the token counts of the complete answer."""
        usage = _usage(self.facts[0].completed.usage)
        return usage | {"output_tokens": 0} if self._call.wants_only_echo else usage


class StreamedMessage(_MessageAnswer):
    """Server-sent events."""

    def __init__(self, call: Call, exchange: Exchange, *, decode: Decode, answer_id: RequestId) -> None:
        super().__init__(call, exchange, decode=decode, answer_id=answer_id)
        self._has_begun = False

    async def _send(self, changes: Sequence[BlockChange]) -> None:
        """Write the changes as events, in one write."""
        events = [_change_event(change) for change in changes]
        if not self._has_begun:
            self._has_begun = True
            events.insert(0, self._start())
        if events:
            await self._exchange.write("".join(events).encode())

    def finish(self) -> None:
        """Write why the answer ended, and the counts."""
        end = _event("message_delta", delta=self._end(), usage=self._usage(), **self._report())
        self._exchange.finish((end, _event("message_stop")))

    def _start(self) -> str:
        """Return the first event: clients read the times of marks here alone, other counts again at the end."""
        begun = self.facts[0].begun
        assert begun is not None, "an answer begins with its first token"
        usage = _usage(begun) | {"output_tokens": 0}
        message = self._message(content=[], stop_reason=None, stop_sequence=None, usage=usage)
        return _event("message_start", message=message)


class GatheredMessage(_MessageAnswer):
    """One JSON document."""

    def __init__(self, call: Call, exchange: Exchange, *, decode: Decode, answer_id: RequestId) -> None:
        super().__init__(call, exchange, decode=decode, answer_id=answer_id)
        self._texts: list[tuple[Block, list[str]]] = []
        """The blocks so far, each with the pieces of its text."""

    async def _send(self, changes: Sequence[BlockChange]) -> None:
        """Keep the changes."""
        for change in changes:
            if isinstance(change, BlockStart):
                self._texts.append((change.block, []))
            elif isinstance(change, BlockDelta):
                self._texts[-1][1].append(change.text)

    def finish(self) -> None:
        """Send the document."""
        content = [_content(block, "".join(pieces)) for block, pieces in self._texts]
        self._exchange.finish_json(self._message(content=content, **self._end(), usage=self._usage(), **self._report()))


def _change_event(change: BlockChange) -> str:
    index = change.block.index
    match change:
        case BlockStart(block=block):
            return _event("content_block_start", index=index, content_block=_opened(block))
        case BlockDelta(block=block, text=text):
            kind, member = _DELTAS[block.kind]
            return _event("content_block_delta", index=index, delta={"type": kind, member: text})
        case BlockStop(block=block):
            stop = _event("content_block_stop", index=index)
            if block.kind is not BlockKind.THINKING:
                return stop
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            return _event("content_block_delta", index=index, delta=signature) + stop


def _event(name: str, **members: Any) -> str:
    return f"event: {name}\ndata: {quote({'type': name, **members})}\n\n"


def _opened(block: Block) -> dict[str, Any]:
    """Return a block without its text."""
    if block.kind is BlockKind.THINKING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return _content(block, "")


def _content(block: Block, text: str) -> dict[str, Any]:
    """Return a whole block."""
    if block.kind is BlockKind.THINKING:
        return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": input_of(text)}


def input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, also where the model has not written a whole one."""
    try:
        given = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {INVALID_INPUT: arguments}


def _usage(counted: pb.Usage) -> dict[str, Any]:
    """Return counts of disjoint parts of the prompt, and of the answer."""
    created = creation_by_ttl(counted.cache_writes)
    return {
        "input_tokens": counted.num_prompt_tokens - counted.num_cached_tokens - sum(created.values()),
        "output_tokens": counted.num_output_tokens,
        "cache_read_input_tokens": counted.num_cached_tokens,
        "cache_creation_input_tokens": sum(created.values()),
        "cache_creation": created,
    }
