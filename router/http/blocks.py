"""Splits the text of an answer into content blocks: thoughts, text and calls of tools, while it is written.

Blocks follow one another; index i has ended when i + 1 begins. Each token's text is read by itself, so that blocks are
the same however tokens are merged on their way, streamed or not.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from common.chat.deltas import ParsedDelta
from common.chat.parsing import MessageParser
from kvrelay.v1 import inference_pb2 as pb
from router.http.styles import call_id


class BlockKind(StrEnum):
    """Type of a block, by the name that Anthropic's API has for it."""

    THINKING = "thinking"
    TEXT = "text"
    TOOL_USE = "tool_use"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    """The tool that is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStart:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDelta:
    """More text of the block that began last; of a call it is the next piece of the arguments' JSON."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStop:
    """The block that began last ends."""

    block: Block
    is_whole: bool
    """Whether it is not a call whose arguments broke off."""


BlockChange = BlockStart | BlockDelta | BlockStop


class Blocks:
    """The blocks of one answer. Gathers changes until they are taken."""

    def __init__(self, answer_format: pb.AnswerFormat, *, request_id: str) -> None:
        """Begin an answer to a request, in a format."""
        self._request_id = request_id
        self._parser = MessageParser.of(answer_format)
        self._open: Block | None = None
        self._num_blocks = 0
        self._call_idx = 0
        """Index of the call that began last."""
        self._changes: list[BlockChange] = []

    @property
    def end_in_calls(self) -> bool:
        """Whether there are calls, and all of them are whole."""
        return self._parser.ends_in_calls

    def push(self, text: str) -> None:
        """Read the text of the next token."""
        self._read(self._parser.push(text))

    def finish(self) -> None:
        """End the answer and its last block."""
        self._read(self._parser.finish())
        self._end()

    def take(self) -> list[BlockChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _read(self, delta: ParsedDelta) -> None:
        if delta.reasoning:
            self._grow(BlockKind.THINKING, delta.reasoning)
        calls = delta.tool_calls
        if calls and calls[0].name is None:  # the rest of a call precedes text
            self._grow(BlockKind.TOOL_USE, calls[0].arguments)
            calls = calls[1:]
        if delta.content:
            self._grow(BlockKind.TEXT, delta.content)
        for call in calls:
            if call.name is not None:
                self._begin(BlockKind.TOOL_USE, call_id=call_id(self._request_id, 0, call.index), name=call.name)
                self._call_idx = call.index
            self._grow(BlockKind.TOOL_USE, call.arguments)

    def _grow(self, kind: BlockKind, text: str) -> None:
        """Add text to the open block, or to a new one if that is of another kind."""
        block = self._open
        if block is None or block.kind is not kind:
            block = self._begin(kind)
        if not text:
            return
        last = self._changes[-1] if self._changes else None
        if isinstance(last, BlockDelta):
            self._changes[-1] = replace(last, text=last.text + text)
        else:
            self._changes.append(BlockDelta(block=block, text=text))

    def _begin(self, kind: BlockKind, *, call_id: str = "", name: str = "") -> Block:
        self._end()
        block = self._open = Block(index=self._num_blocks, kind=kind, call_id=call_id, name=name)
        self._num_blocks += 1
        self._changes.append(BlockStart(block=block))
        return block

    def _end(self) -> None:
        if self._open is not None:
            is_whole = self._open.kind is not BlockKind.TOOL_USE or self._parser.is_whole(self._call_idx)
            self._changes.append(BlockStop(block=self._open, is_whole=is_whole))
            self._open = None
