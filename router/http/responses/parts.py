"""The items of a response's output: reasoning, messages and calls of functions, each with its events.

added ──▶ part added ──▶ deltas … ──▶ text done ──▶ part done ──▶ item done

A call has no parts: its deltas are its arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

from router.http.json_parts import members_parts, quote

Document = dict[str, Any]


class Events:
    """Events that have not gone out yet; none where the answer is not streamed. Event loop only."""

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._num_emitted = 0
        self._waiting: list[Iterable[str]] = []

    def emit(self, kind: str, **members: Any) -> None:
        """Add an event."""
        if self._is_streamed:
            self._add(kind, members_parts(members))

    def emit_json(self, kind: str, members: str) -> None:
        """Add an event whose members, at least one, have been rendered: `"a":1,"b":2`."""
        if self._is_streamed:
            self._add(kind, (members, "}"))

    def take(self) -> Iterator[str]:
        """Return the events that wait, once, in parts."""
        taken, self._waiting = self._waiting, []
        return chain.from_iterable(taken)

    def _add(self, kind: str, members: Iterable[str]) -> None:
        head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._num_emitted},'
        self._waiting.append(chain((head,), members, ("\n\n",)))
        self._num_emitted += 1


class Item(ABC):
    """One item, while it is written."""

    prefix: ClassVar[str]
    """Beginning of its id."""
    delta: ClassVar[str]
    """Name of the event with the next piece of its text."""
    place: ClassVar[Document] = {}
    """Where in the item its text is."""

    def __init__(self, events: Events, *, request_id: str, index: int) -> None:
        self.index = index
        """Place in the output."""
        self._events = events
        self._texts: list[str] = []
        self._id = f"{self.prefix}_{request_id}_{index}"
        self._place: Document = {"item_id": self._id, "output_index": index, **self.place}
        self._delta_head = quote(self._place)[1:-1]

    @property
    def text(self) -> str:
        """Text so far."""
        return "".join(self._texts)

    def open(self) -> None:
        """Add the events of the beginning."""
        self._events.emit("response.output_item.added", output_index=self.index, item=self.document("in_progress"))

    def push(self, text: str) -> None:
        """Add text."""
        self._texts.append(text)
        self._events.emit_json(self.delta, f'{self._delta_head},"delta":{quote(text)}')

    def close(self, status: str) -> Document:
        """Add the events of the end; returns the complete item."""
        document = self.document(status)
        self._events.emit("response.output_item.done", output_index=self.index, item=document)
        return document

    @abstractmethod
    def document(self, status: str) -> Document:
        """Return the item with the text so far."""


class _PartedItem(Item):
    """An item whose text is in a part."""

    text_done: ClassVar[str]
    """Name of the event with the whole text."""
    done_members: ClassVar[tuple[str, ...]] = ("text",)
    """Members of the part that this event has."""
    place = {"content_index": 0}  # noqa: RUF012 - declared so by the base class

    def __init__(self, events: Events, *, request_id: str, index: int) -> None:
        super().__init__(events, request_id=request_id, index=index)
        self._has_part = False

    def open(self) -> None:
        """Add the events of the beginning, and of the part's."""
        super().open()
        self._events.emit("response.content_part.added", **self._place, part=self.part())
        self._has_part = True

    def close(self, status: str) -> Document:
        """Add the events of the ends of the text, the part and the item; returns the complete item."""
        part = self.part()
        self._events.emit(self.text_done, **self._place, **{name: part[name] for name in self.done_members})
        self._events.emit("response.content_part.done", **self._place, part=part)
        return super().close(status)

    @abstractmethod
    def part(self) -> Document:
        """Return the part with the text so far."""


class ReasoningItem(_PartedItem):
    """The model's reasoning."""

    prefix = "rs"
    delta = "response.reasoning_text.delta"
    text_done = "response.reasoning_text.done"

    def part(self) -> Document:
        """Return the part."""
        return {"type": "reasoning_text", "text": self.text}

    def document(self, status: str) -> Document:
        """Return the item."""
        content = [self.part()] if self._has_part else []
        return {"type": "reasoning", "id": self._id, "summary": [], "content": content, "status": status}


class MessageItem(_PartedItem):
    """Text of the answer."""

    prefix = "msg"
    delta = "response.output_text.delta"
    text_done = "response.output_text.done"
    done_members = ("text", "logprobs")

    def __init__(self, events: Events, *, request_id: str, index: int) -> None:
        super().__init__(events, request_id=request_id, index=index)
        self._logprobs: list[Document] = []

    def push(self, text: str, logprobs: Sequence[Document] = ()) -> None:
        """Add text, with the log-probabilities of its tokens where they are wanted."""
        self._texts.append(text)
        self._logprobs += logprobs
        if logprobs:  # of many tokens, where their text was not certain before
            self._events.emit(self.delta, **self._place, logprobs=logprobs, delta=text)
        else:
            self._events.emit_json(self.delta, f'{self._delta_head},"logprobs":[],"delta":{quote(text)}')

    def part(self) -> Document:
        """Return the part."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def document(self, status: str) -> Document:
        """Return the item."""
        content = [self.part()] if self._has_part else []
        return {"type": "message", "id": self._id, "role": "assistant", "content": content, "status": status}


class CallItem(Item):
    """A call of a function."""

    prefix = "fc"
    delta = "response.function_call_arguments.delta"

    def __init__(self, events: Events, *, request_id: str, index: int, name: str, call_id: str) -> None:
        super().__init__(events, request_id=request_id, index=index)
        self._name = name
        self._call_id = call_id

    def close(self, status: str) -> Document:
        """Add the events of the ends of the arguments and the item; returns the complete item."""
        members = {"name": self._name, "arguments": self.text}
        self._events.emit("response.function_call_arguments.done", **self._place, **members)
        return super().close(status)

    def document(self, status: str) -> Document:
        """Return the item."""
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": status,
        }
