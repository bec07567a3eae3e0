"""Reads answers in channels: messages with a header that tells whether they are thoughts, a call or content."""

import re
from collections.abc import Callable

from common.chat.calls import CallReader
from common.chat.deltas import Collector
from common.chat.formats import MAX_TOOL_NAME_CHARS, TOOL_FORMATS
from common.chat.reader import Malformed, Steps

_FORMAT = TOOL_FORMATS["gpt-oss"]
_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>assistant", "<|channel|>", "<|constrain|>", "<|message|>"
_CHANNELS = ("analysis", "commentary", "final")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_WORD_RUN = re.compile(r"\w+")
_TEXT_RUN = re.compile(r"[^<]+")


class ChannelReader(CallReader):
    """An answer whose first message the prompt has begun."""

    def __init__(self, out: Collector, *, has_reasoning: bool, has_calls: bool) -> None:
        super().__init__(out, _FORMAT)
        self._has_reasoning = has_reasoning
        self._has_calls = has_calls

    def read(self) -> Steps[None]:
        """Read the whole answer."""
        while (yield from self._more()):
            try:
                channel, tool = yield from self._header()
            except Malformed:
                if not self.num_held:
                    self.step()
                self._flush()
                yield from self._body(self._flush)
                continue
            if tool and self._has_calls:
                yield from self._attempt(self._call(tool))
                continue
            if not tool:
                self.drop_markup()
            yield from self._body(self._think if self._has_reasoning and channel == "analysis" else self._flush)
        self.drop_markup()

    def marked_calls(self) -> Steps[None]:
        """Refuse: calls are messages."""
        raise Malformed
        yield

    def _header(self) -> Steps[tuple[str, str]]:
        """Read a message up to its body; return its channel, and the tool to which it goes. Raises Malformed."""
        yield from self.optional(_START)
        tool = yield from self._recipient()
        yield from self.literal(_CHANNEL)
        channel = yield from self.whole(_WORD_RUN, max_chars=MAX_TOOL_NAME_CHARS)
        tool = tool or (yield from self._recipient())
        yield from self.space()
        yield from self.optional(_CONSTRAIN)
        body = yield from self.whole(_WORD_RUN, max_chars=MAX_TOOL_NAME_CHARS)
        yield from self.space()
        yield from self.literal(_MESSAGE)
        if channel not in _CHANNELS or body not in ("", "json"):
            raise Malformed
        return channel, tool

    def _recipient(self) -> Steps[str]:
        """Read the tool to which a message goes, if any. Raises Malformed for another recipient."""
        yield from self.space()
        if not (yield from self.optional("to=")):
            return ""
        yield from self.literal(self.format.namespace)
        return (yield from self.name())

    def _call(self, name: str) -> Steps[None]:
        """Read a body that is the arguments of a call. Raises Malformed."""
        yield from self.arguments(name)
        for end in _ENDS:
            yield from self.closing(end)

    def _body(self, deliver: Callable[[], None]) -> Steps[None]:
        """Read and deliver text up to the end of its message."""
        while (yield from self.more()):
            if not self.run(_TEXT_RUN):
                for end in _ENDS:
                    if (yield from self.optional(end)):
                        self.drop_markup()
                        return
                if (yield from self.is_ahead(_START)) or (yield from self.is_ahead(_CHANNEL)):
                    return
                self.step()
            deliver()

    def _more(self) -> Steps[bool]:
        """Return whether there is another message; space behind a call is none."""
        return bool((yield from self.space())) if self._follows_call else (yield from self.more())

    def _think(self) -> None:
        self._out.add_reasoning(self.drop_held())
        self._follows_call = False
