"""Reads tool calls that are a name and then arguments, these as a JSON object or each in tags.

Values in tags are plain text: the types that a tool's schema allows tell which text they are, and which JSON.
"""

import re

from common.chat.calls import MemberReader, ObjectReader
from common.chat.deltas import Collector
from common.chat.formats import MAX_TOOL_NAME_CHARS, ToolFormat
from common.chat.json_reader import quoted
from common.chat.parameter_types import ANY_TYPE, TEXT, ToolTypes, Types, typed_json
from common.chat.reader import Malformed, Steps

MAX_KEY_CHARS = 400
"""Longest name of an argument."""
KEY_RUN = re.compile(r'[^<>"\s]+')
_ID_RUN = re.compile(r"[A-Za-z0-9]+")


class NamedReader(ObjectReader):
    """A name, then arguments as an object; where the format has lists, also a list of objects."""

    def marked_calls(self) -> Steps[None]:
        """Read the calls up to the marker that closes them, or one call where there is none."""
        if self.format.is_list and (yield from self.space()) == "[":
            yield from self.listed_calls()
            return
        while True:
            yield from self._call()
            yield from self.closing(self.format.end.strip())
            if not self.format.closing or (yield from self.closing(self.format.closing)):
                return

    def _call(self) -> Steps[None]:
        yield from self.markup(self.format.begin)
        yield from self.space()
        name = yield from self.name()
        if self.format.call_id and (yield from self.optional(self.format.call_id)):
            call_id = yield from self.whole(_ID_RUN, max_chars=MAX_TOOL_NAME_CHARS)
            if not re.fullmatch(self.format.id_pattern, call_id):
                raise Malformed
        yield from self.space()
        yield from self.optional(self.format.after_name.strip())
        yield from self.arguments(name)


class TagsReader(MemberReader):
    """A name, then each argument in tags."""

    def __init__(self, out: Collector, markup: ToolFormat, types: ToolTypes) -> None:
        super().__init__(out, markup)
        assert markup.tags is not None
        self._tags = tags = markup.tags
        self._types = types
        self._end = markup.end.strip() or markup.closing
        value_end = tags.end.strip()
        self._value_ends = (f"\n{value_end}", value_end) if tags.end.startswith("\n") else (value_end,)
        self._plain_value = re.compile(rf"[^\n{re.escape(value_end[0])}]+")

    def marked_calls(self) -> Steps[None]:
        """Read the calls up to the marker that closes them."""
        while True:
            yield from self.markup(self.format.begin)
            yield from self.space()
            name = yield from self.name()
            yield from self.markup(self.format.after_name)
            yield from self._members(name)
            if self._end == self.format.closing or (yield from self.closing(self.format.closing)):
                return

    def _members(self, name: str) -> Steps[None]:
        self.begin_members(name)
        types = self._types.get(name, {})
        yield from self.space()
        while not (yield from self.optional(self._end)):
            key = yield from self._key()
            self.add_key(key)
            yield from self._value(types.get(key, ANY_TYPE))
            yield from self.space()
        self.end_members()

    def _key(self) -> Steps[str]:
        """Read the markup of an argument up to its value, and return its name."""
        yield from self.literal(self._tags.key)
        key = yield from self.whole(KEY_RUN, max_chars=MAX_KEY_CHARS)
        if not key:
            raise Malformed
        yield from self.markup(self._tags.value)
        if self._tags.value.endswith("\n"):
            yield from self.optional("\n")
        return key

    def _value(self, types: Types) -> Steps[None]:
        """Read a value and its end; text goes out as it comes, everything else when it is whole."""
        if types == TEXT:
            self.deliver('"')
        pieces: list[str] = []
        while not (yield from self._is_at_end()):
            text = self.run(self._plain_value) or self.step()
            if types == TEXT:
                self.deliver(quoted(text))
            else:
                pieces.append(text)
        self.deliver('"' if types == TEXT else typed_json("".join(pieces), types))

    def _is_at_end(self) -> Steps[bool]:
        """Read the end of a value when it comes next. Raises Malformed at the end of the answer."""
        if not (yield from self.more()):
            raise Malformed
        for end in self._value_ends:
            if (yield from self.optional(end)):
                return True
        return False
