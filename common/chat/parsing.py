"""Splits a model's answer into content, reasoning and tool calls while it is written.

Any split of an answer into pushes gives the same message. Text that may begin markup is held back only as long as it
is ambiguous; what turns out not to be markup is content, so that nothing is lost.
"""

import re
from typing import Protocol

from common.chat.calls import ArgumentsReader, CallReader, ObjectReader
from common.chat.channels import ChannelReader
from common.chat.deltas import Collector, ParsedDelta, Span, ToolCallDelta
from common.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, Syntax, ToolFormat
from common.chat.named_calls import NamedReader, TagsReader
from common.chat.parameter_types import read_parameter_types
from common.chat.pythonic import PythonReader
from common.chat.reader import Malformed, Reader, Steps

__all__ = ["ParsedDelta", "MessageParser", "ToolCallDelta"]

_NEWLINES = re.compile(r"\n+")
_ANY = re.compile(r"(?s:.+)")


class AnswerFormatLike(Protocol):
    """How an answer is written, on the wire or as a record; empty names stand for none."""

    @property
    def tools(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def in_reasoning(self) -> bool: ...
    @property
    def forced_name(self) -> str: ...
    @property
    def parameter_types(self) -> str: ...


def has_markup(answer: AnswerFormatLike) -> bool:
    """Return whether answers in a format may hold more than content."""
    return bool(answer.tools or answer.reasoning or answer.forced_name)


def is_known(answer: AnswerFormatLike) -> bool:
    """Return whether all markup that a format names is known here."""
    return answer.tools in ("", *TOOL_FORMATS) and answer.reasoning in ("", *REASONING_FORMATS)


class MessageParser:
    """Parses one sample's answer."""

    def __init__(
        self,
        *,
        tools: str | None,
        reasoning: str | None,
        in_reasoning: bool = False,
        forced_name: str | None = None,
        parameter_types: str = "",
    ) -> None:
        """Begin an answer in these formats; without one, text is content unchanged.

        `in_reasoning` says that the answer begins within the thinking. With `forced_name` and no format of tools, the
        answer (after the thinking) is the arguments of one call of that tool, as a JSON object; with a format, its
        markup names the tool and `forced_name` changes nothing. `parameter_types` are those of
        common/chat/parameter_types.py, for formats that write values as plain text. Raises KeyError for an unknown
        format.
        """
        self._out = Collector()
        self._thinking: _ThinkingReader | None = None
        self._calls: CallReader | None = None
        thinking = REASONING_FORMATS[reasoning] if reasoning is not None else None
        markup = TOOL_FORMATS[tools] if tools is not None else None
        if (thinking and thinking.in_channels) or (markup and markup.syntax is Syntax.CHANNELS):
            self._calls = ChannelReader(self._out, has_reasoning=thinking is not None, has_calls=markup is not None)
        else:
            if thinking is not None:
                self._thinking = _ThinkingReader(self._out, thinking, in_reasoning=in_reasoning)
            if markup is not None:
                self._calls = _call_reader(self._out, markup, parameter_types)
            elif forced_name is not None:
                self._calls = ArgumentsReader(self._out, forced_name)
        self._steps = [(reader, reader.read()) for reader in (self._thinking, self._calls) if reader is not None]

    @classmethod
    def of(cls, answer: AnswerFormatLike) -> "MessageParser":
        """Return a parser of answers in a format."""
        return cls(
            tools=answer.tools or None,
            reasoning=answer.reasoning or None,
            in_reasoning=answer.in_reasoning,
            forced_name=answer.forced_name or None,
            parameter_types=answer.parameter_types,
        )

    @property
    def ends_in_calls(self) -> bool:
        """Whether there are calls, and none of them is broken."""
        return self._out.num_tool_calls > 0 and not self._out.broken_calls

    def is_whole(self, index: int) -> bool:
        """Return whether a call that has begun is complete and its arguments are a JSON object."""
        return index not in self._out.broken_calls

    def push(self, text: str, *, is_last: bool = False) -> ParsedDelta:
        """Return what the next piece of the answer adds; with the last piece also what was held back."""
        self._push(text)
        return self.finish() if is_last else self._out.take()

    def finish(self) -> ParsedDelta:
        """Return what was held back. Nothing may be pushed afterwards."""
        self._finish()
        return self._out.take()

    def spans(self, text: str) -> list[Span]:
        """Read the next piece and return what is certain of the text so far, once, instead of a delta."""
        self._push(text)
        return self._out.take_spans()

    def last_spans(self) -> list[Span]:
        """Return the text that was held back. Nothing may be pushed afterwards."""
        self._finish()
        return self._out.take_spans()

    def _finish(self) -> None:
        for reader, _steps in self._steps:
            reader.end()
            self._push("")

    def _push(self, text: str) -> None:
        for reader, steps in self._steps:
            reader.add(text)
            next(steps, None)
            if isinstance(reader, _ThinkingReader):
                text = reader.take_rest()
        if self._calls is None:
            self._out.add_content(text)


def _call_reader(out: Collector, markup: ToolFormat, parameter_types: str) -> CallReader:
    match markup.syntax:
        case Syntax.OBJECT:
            return ObjectReader(out, markup)
        case Syntax.PYTHON:
            return PythonReader(out, markup)
        case Syntax.TAGS:
            return TagsReader(out, markup, read_parameter_types(parameter_types))
        case _:
            return NamedReader(out, markup)


class _ThinkingReader(Reader):
    """Reads the thinking at the start of an answer."""

    def __init__(self, out: Collector, markup: ReasoningFormat, *, in_reasoning: bool) -> None:
        super().__init__()
        self._out = out
        self._markup = markup
        self._thought = re.compile(rf"[^{re.escape(markup.close[0])}]+")
        self._in_reasoning = in_reasoning
        self._rest: list[str] = []

    def take_rest(self) -> str:
        """Return the text that has been read after the thinking."""
        rest = "".join(self._rest)
        self._rest.clear()
        return rest

    def read(self) -> Steps[None]:
        """Read the whole answer."""
        yield from self.space()
        try:
            yield from self.literal(self._markup.open)
            self._out.add_markup(self.drop_held())
        except Malformed:
            pass
        else:
            self._in_reasoning = True
        if self._in_reasoning:
            yield from self._thoughts()
            while (yield from self.more()) and self.run(_NEWLINES):
                pass
            self._out.add_markup(self.drop_held())
        while (yield from self.more()):
            self.run(_ANY)
            self._rest.append(self.drop_held())
        self._rest.append(self.drop_held())

    def _thoughts(self) -> Steps[None]:
        """Read up to the end of the thinking, and its closing tag."""
        while (yield from self.more()):
            if not self.run(self._thought):
                try:
                    yield from self.literal(self._markup.close)
                except Malformed:
                    self.step()
                else:
                    return
            self._out.add_reasoning(self.drop_held())
        self._out.add_reasoning(self.drop_held())
