"""Reads tool calls written as a list of Python calls, and their arguments as JSON.

Only here is argument text not what the model wrote: keyword arguments become the members of an object, and literals
become JSON, with `, ` and `: ` between them. Values are strings, numbers, lists, dictionaries with strings as keys, and
True, False and None, also as JSON spells them.
"""

import json
import re

from common.chat.calls import CallReader
from common.chat.deltas import Collector
from common.chat.formats import TOOL_FORMATS
from common.chat.json_reader import MAX_DEPTH, SCALAR_RUN, quoted, scalar
from common.chat.reader import Malformed, Steps

MAX_WORD_CHARS = 400
"""Longest keyword."""
_WORD_RUN = re.compile(r"\w+")
_STRING_RUNS = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonicReader(CallReader):
    """`[f(a=1, b="x"), g()]`, between markers or at the start of the answer."""

    format = TOOL_FORMATS["pythonic"]

    def __init__(self, out: Collector) -> None:
        super().__init__(out)
        self._first: tuple[str, str] | None = None
        """Name of a call that is not announced, and its JSON up to the first value."""

    def marked_calls(self) -> Steps[None]:
        """Read the list and the closing marker."""
        yield from self.space()
        yield from self.bare_calls()
        yield from self.closing(self.format.markers[1])

    def bare_calls(self) -> Steps[None]:
        """Read the list."""
        separator = "["
        while separator != "]":
            yield from self.literal(separator)
            yield from self.space()
            name = yield from self.name()
            yield from self.space()
            yield from self.literal("(")
            yield from self._keywords(name)
            separator = "]" if (yield from self.space()) == "]" else ","
        yield from self.closing("]")

    def _keywords(self, name: str) -> Steps[None]:
        """Read keyword arguments up to the end of the call."""
        keys: set[str] = set()
        while (yield from self.space()) != ")":
            key = yield from self.whole(_WORD_RUN, max_chars=MAX_WORD_CHARS)
            if not key.isidentifier() or key in keys:
                raise Malformed
            yield from self.space()
            yield from self.literal("=")
            yield from self.space()
            member = f"{json.dumps(key, ensure_ascii=False)}: "
            if keys:
                self._deliver(f", {member}")
            else:
                self._first = (name, f"{{{member}")
            keys.add(key)
            yield from self._value(1)
            if (yield from self.space()) != ")":
                yield from self.literal(",")
        if not keys:
            self._first = (name, "{")
        self.step()
        self._deliver("}")
        self.complete()

    def _deliver(self, text: str) -> None:
        """Deliver JSON in place of the text that is held; with the first value, announce the call."""
        if self._first is not None:
            (name, member), self._first = self._first, None
            self.begin(name)
            self._out.add_arguments(member)
        self._out.add_arguments(text)
        self.drop_markup()

    def _value(self, depth: int) -> Steps[None]:
        char = yield from self.peek()
        if char in ("[", "{"):
            if depth == MAX_DEPTH:
                raise Malformed
            yield from self._container("]" if char == "[" else "}", depth)
        elif char in ('"', "'"):
            yield from self._string()
        else:
            word = yield from self.whole(SCALAR_RUN)
            self._deliver(scalar(word))

    def _container(self, closer: str, depth: int) -> Steps[None]:
        self._deliver(self.step())
        is_first = True
        while (yield from self.space()) != closer:
            if not is_first:
                self._deliver(", ")
            is_first = False
            if closer == "}":
                yield from self._member_key()
            yield from self._value(depth + 1)
            if (yield from self.space()) != closer:
                yield from self.literal(",")
        self._deliver(self.step())

    def _member_key(self) -> Steps[None]:
        if (yield from self.peek()) not in ('"', "'"):
            raise Malformed
        yield from self._string()
        yield from self.space()
        yield from self.literal(":")
        self._deliver(": ")
        yield from self.space()

    def _string(self) -> Steps[None]:
        quote = self.step()
        self._deliver('"')
        while (char := (yield from self.peek())) != quote:
            if char == "\\":
                yield from self._escape()
            elif text := self.run(_STRING_RUNS[quote]):
                self._deliver(quoted(text))
            else:
                raise Malformed
        self.step()
        self._deliver('"')

    def _escape(self) -> Steps[None]:
        self.step()
        kind = yield from self.peek()
        if not kind:
            raise Malformed
        self.step()
        digits = ""
        for _ in range(_HEX_DIGITS.get(kind, 0)):
            digit = yield from self.peek()
            if not digit or digit not in "0123456789abcdefABCDEF":
                raise Malformed
            digits += self.step()
        if kind == "u":
            self._deliver(f"\\u{digits}")  # may be half of a pair
        elif digits:
            self._deliver(quoted(_character(digits)))
        elif kind in ("\\", '"', "'", "/"):
            self._deliver(quoted(kind))
        else:
            self._deliver(quoted(_ESCAPES.get(kind, f"\\{kind}")))


def _character(digits: str) -> str:
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise Malformed
    return chr(code)
