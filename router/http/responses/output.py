"""The output of a response: tokens become items, and the events that report them.

Tokens are read one by one where an item depends on it, and not on how they were gathered on their way.
"""

from collections.abc import Sequence
from typing import Any

from common.chat.parsing import has_markup
from common.wire_names import FINISH_REASON_NAMES
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2
from router.http.blocks import Block, BlockChange, BlockDelta, BlockKind, Blocks, BlockStart, BlockStop
from router.http.responses.parts import CallItem, Document, Events, Item, MessageItem, ReasoningItem
from router.http.styles import TokenTexts, logprob_entries


class ResponseOutput:
    """The output of one request: an item for each block of the answer. Event loop only."""

    def __init__(self, events: Events, *, request_id: str, answer: pb.AnswerFormat, texts: TokenTexts | None) -> None:
        """`texts` is set where log-probabilities are wanted."""
        self.documents: list[Document] = []
        """Items that are complete."""
        self.num_reasoning_tokens = 0
        self.is_cut = False
        """Whether the answer ended at its length limit."""
        self._events = events
        self._texts = texts
        self._request_id = request_id
        self._is_plain = texts is None and not has_markup(answer)
        """Whether nothing depends on single tokens."""
        self._blocks = Blocks(answer, request_id=request_id)
        self._item: Item | None = None
        """The item that goes on."""
        self._undecided: list[Document] = []
        """Tokens whose text has not become a part of an item, each by its log-probabilities where they are wanted."""

    @property
    def ends_in_calls(self) -> bool:
        """Whether the answer has calls of tools, all of them whole."""
        return self._blocks.end_in_calls

    def take(self, tokens: Sequence[sampling_pb2.SampleToken]) -> None:
        """Add tokens."""
        if FINISH_REASON_NAMES.get(tokens[-1].finish_reason) == "length":
            self.is_cut = True
        if self._is_plain:
            self._blocks.push("".join([token.text for token in tokens]))
            self._follow(self._blocks.take())
            return
        for token in tokens:
            self._undecided.append({} if self._texts is None else _logprobs_of(token, self._texts))
            self._blocks.push(token.text)
            self._follow(self._blocks.take())

    def close(self) -> None:
        """End the output: an empty answer is a message without text."""
        self._blocks.finish()
        changes = self._blocks.take()
        if not changes:
            self._begin(Block(index=0, kind=BlockKind.TEXT))
        if isinstance(self._item, MessageItem) and not any(isinstance(each, BlockDelta) for each in changes):
            self._push_rest(self._item)
        self._follow(changes[:-1])
        is_whole = not self.is_cut and all(each.is_whole for each in changes[-1:] if isinstance(each, BlockStop))
        self._end(is_whole=is_whole)

    def partial(self) -> list[Document]:
        """Return the items of an answer that ends in the middle."""
        going = [] if self._item is None else [self._item.document("incomplete")]
        return [*self.documents, *going]

    def _follow(self, changes: Sequence[BlockChange]) -> None:
        """Do with the items what has happened to the blocks."""
        for change in changes:
            match change:
                case BlockStart(block=block):
                    self._begin(block)
                case BlockDelta(text=text):
                    self._push(text)
                case BlockStop(is_whole=is_whole):
                    self._end(is_whole=is_whole)
        if changes:
            self._undecided.clear()

    def _begin(self, block: Block) -> None:
        place: dict[str, Any] = {"request_id": self._request_id, "index": block.index}
        match block.kind:
            case BlockKind.THINKING:
                self._item = ReasoningItem(self._events, **place)
            case BlockKind.TEXT:
                self._item = MessageItem(self._events, **place)
            case BlockKind.TOOL_USE:
                self._item = CallItem(self._events, **place, name=block.name, call_id=block.call_id)
        self._item.open()

    def _push(self, text: str) -> None:
        match self._item:
            case MessageItem() as message:
                message.push(text, self._logprobs())
            case ReasoningItem() as thoughts:
                self.num_reasoning_tokens += len(self._undecided)
                thoughts.push(text)
            case Item() as item:
                item.push(text)

    def _push_rest(self, message: MessageItem) -> None:
        """Add the log-probabilities of tokens without text, such as the end of sequence."""
        if self._texts is not None and self._undecided:
            message.push("", self._logprobs())

    def _end(self, *, is_whole: bool) -> None:
        assert self._item is not None, "a block begins before it ends"
        self.documents.append(self._item.close("completed" if is_whole else "incomplete"))
        self._item = None

    def _logprobs(self) -> list[Document]:
        return [] if self._texts is None else list(self._undecided)


def _logprobs_of(token: sampling_pb2.SampleToken, texts: TokenTexts) -> Document:
    """Return the log-probabilities of a token; unknown bytes are none in this API's types."""
    (entry,) = logprob_entries([token], texts)
    for each in (entry, *entry["top_logprobs"]):
        each["bytes"] = each["bytes"] or []
    return entry
