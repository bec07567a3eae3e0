"""The output of a response: tokens become items, and the events that report them.

An answer with reasoning or calls is parsed token by token, so that its items do not depend on how tokens were gathered
on their way.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from common.chat.deltas import ParsedDelta, ToolCallDelta
from common.chat.parsing import MessageParser, has_markup
from common.wire_names import FINISH_REASON_NAMES
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2
from router.http.responses.parts import CallItem, Document, Events, Item, MessageItem, ReasoningItem
from router.http.styles import TokenTexts, call_id, logprob_entries

AnyItem = TypeVar("AnyItem", bound=Item)


class ResponseOutput:
    """The output of one request. Event loop only."""

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
        self._parser: MessageParser | None = MessageParser.of(answer) if has_markup(answer) else None
        self._item: Item | None = None
        """The item that goes on."""
        self._call_idx = -1
        """Index of the last call."""
        self._undecided: list[sampling_pb2.SampleToken] = []
        """Tokens whose text has not come out of the parser."""

    def take(self, tokens: Sequence[sampling_pb2.SampleToken]) -> None:
        """Add tokens."""
        if FINISH_REASON_NAMES.get(tokens[-1].finish_reason) == "length":
            self.is_cut = True
        if self._parser is None and self._texts is None:
            if text := "".join([token.text for token in tokens]):
                self._message().push(text)
            return
        for token in tokens:
            self._undecided.append(token)
            self._add(self._parse(token))

    def close(self) -> None:
        """End the output: an empty answer is a message without text."""
        if self._item is None and not self.documents:
            self._message()
        if self._texts is not None and self._undecided and isinstance(self._item, MessageItem):
            self._item.push("", self._logprobs())  # tokens without text, such as the end of sequence
        self._close_item("incomplete" if self.is_cut else "completed")

    def partial(self) -> list[Document]:
        """Return the items of an answer that ends in the middle."""
        going = [] if self._item is None else [self._item.document("incomplete")]
        return [*self.documents, *going]

    def _parse(self, token: sampling_pb2.SampleToken) -> ParsedDelta:
        if self._parser is None:
            return ParsedDelta(content=token.text)
        return self._parser.push(token.text, is_last=bool(token.finish_reason))

    def _add(self, delta: ParsedDelta) -> None:
        calls = list(delta.tool_calls)
        while calls and calls[0].index == self._call_idx:  # before text that follows the call
            self._continue_call(calls.pop(0))
        if delta.reasoning:
            self.num_reasoning_tokens += len(self._undecided)
            self._reasoning().push(delta.reasoning)
        if delta.content:
            self._message().push(delta.content, self._logprobs())
        for call in calls:
            self._continue_call(call)
        if delta.content or delta.reasoning or delta.tool_calls:
            self._undecided.clear()

    def _reasoning(self) -> ReasoningItem:
        """Return the thoughts that go on, or new ones."""
        if isinstance(self._item, ReasoningItem):
            return self._item
        return self._begin(ReasoningItem(self._events, request_id=self._request_id, index=self._index))

    def _message(self) -> MessageItem:
        """Return the message that goes on, or a new one."""
        if isinstance(self._item, MessageItem):
            return self._item
        return self._begin(MessageItem(self._events, request_id=self._request_id, index=self._index))

    def _continue_call(self, call: ToolCallDelta) -> None:
        """Begin a call, or add to its arguments."""
        if call.name is not None:
            self._call_idx = call.index
            names = {"name": call.name, "call_id": call_id(self._request_id, 0, call.index)}
            self._begin(CallItem(self._events, request_id=self._request_id, index=self._index, **names))
        assert isinstance(self._item, CallItem), "a call ends before anything else begins"
        if call.arguments:
            self._item.push(call.arguments)

    @property
    def _index(self) -> int:
        """Place of a new item."""
        return len(self.documents) + (self._item is not None)

    def _begin(self, item: AnyItem) -> AnyItem:
        self._close_item("completed")
        self._item = item
        item.open()
        return item

    def _close_item(self, status: str) -> None:
        if self._item is not None:
            is_broken = isinstance(self._item, CallItem) and not self._is_whole(self._call_idx)
            self.documents.append(self._item.close("incomplete" if is_broken else status))
            self._item = None

    def _is_whole(self, call_idx: int) -> bool:
        return self._parser is None or self._parser.is_whole(call_idx)

    def _logprobs(self) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens that make a text; unknown bytes are none in this API's types."""
        if self._texts is None:
            return []
        entries = logprob_entries(self._undecided, self._texts)
        for entry in entries:
            for each in (entry, *entry["top_logprobs"]):
                each["bytes"] = each["bytes"] or []
        return entries
