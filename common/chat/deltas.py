"""Deltas of a message: the content, reasoning and parts of tool calls that a piece of an answer adds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """The next part of a tool call."""

    index: int
    """0, 1, … within the answer."""
    name: str | None
    """Set in the first delta of a call."""
    arguments: str
    """Next piece of the argument text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of an answer's text, as the model wrote it."""

    text: str
    is_content: bool
    """Whether it is content, which stop strings are compared with; else reasoning, a call or markup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedDelta:
    """The next part of a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


def joined(deltas: Sequence[ParsedDelta]) -> ParsedDelta:
    """Return the deltas of an answer as one."""
    return ParsedDelta(
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
    )


def whole_calls(deltas: Iterable[ToolCallDelta]) -> list[tuple[str, str]]:
    """Return name and arguments of each call in the deltas of an answer."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        names[delta.index] = delta.name or names.get(delta.index, "")
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [(names[index], "".join(arguments[index])) for index in sorted(names)]


def call_id(sample_index: int, index: int) -> str:
    """Return the id of a call; nine letters and digits, which every template accepts."""
    return f"call{sample_index:02}{index:03}"


class Collector:
    """Gathers the parts of a delta, and of which stretches of text they are made."""

    def __init__(self) -> None:
        self.num_tool_calls = 0
        self.broken_calls: set[int] = set()
        """Indices of calls whose arguments are not complete, or not JSON."""
        self._spans: list[Span] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[int, str | None, list[str]]] = []

    def add_content(self, text: str) -> None:
        """Append content."""
        self._content.append(text)
        self._spans.append(Span(text=text, is_content=True))

    def add_reasoning(self, text: str) -> None:
        """Append reasoning."""
        self._reasoning.append(text)
        self.add_markup(text)

    def add_markup(self, text: str) -> None:
        """Note text that is not content, or not by itself."""
        self._spans.append(Span(text=text, is_content=False))

    def begin_call(self, name: str) -> None:
        """Begin the next tool call, which is broken until it ends."""
        self._calls.append((self.num_tool_calls, name, []))
        self.broken_calls.add(self.num_tool_calls)
        self.num_tool_calls += 1

    def end_call(self) -> None:
        """Note that the arguments of the call that was begun last are complete."""
        self.broken_calls.discard(self.num_tool_calls - 1)

    def add_arguments(self, text: str) -> None:
        """Append to the arguments of the call that was begun last."""
        if not self._calls:
            self._calls.append((self.num_tool_calls - 1, None, []))
        self._calls[-1][2].append(text)

    def take(self) -> ParsedDelta:
        """Return the delta and begin the next one."""
        calls = tuple(
            ToolCallDelta(index=index, name=name, arguments="".join(pieces)) for index, name, pieces in self._calls
        )
        delta = ParsedDelta(content="".join(self._content), reasoning="".join(self._reasoning), tool_calls=calls)
        self._content, self._reasoning, self._calls, self._spans = [], [], [], []
        return delta

    def take_spans(self) -> list[Span]:
        """Return the stretches of text that the delta is made of, and begin the next one."""
        spans = self._spans
        self.take()
        return spans
