"""Reads tool calls written as a list of Python calls, and their arguments as JSON.

Keyword arguments become the members of an object, and literals become JSON, with `, ` and `: ` between them. Values are
strings, numbers, lists, dictionaries with strings as keys, and True, False and None, also as JSON spells them.
"""

import re

from common.chat.calls import MemberReader
from common.chat.json_reader import MAX_DEPTH, SCALAR_RUN, quoted, scalar
from common.chat.reader import Malformed, Steps

MAX_WORD_CHARS = 400
"""Longest keyword."""
_WORD_RUN = re.compile(r"\w+")
_STRING_RUNS = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonReader(MemberReader):
    """`[f(a=1, b="x"), g()]`, between markers or at the start of the answer."""

    def marked_calls(self) -> Steps[None]:
        """Read the list and the closing marker."""
        yield from self.space()
        yield from self.bare_calls()
        yield from self.closing(self.format.closing)

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
        self.begin_members(name)
        while (yield from self.space()) != ")":
            key = yield from self.whole(_WORD_RUN, max_chars=MAX_WORD_CHARS)
            if not key.isidentifier():
                raise Malformed
            yield from self.space()
            yield from self.literal("=")
            yield from self.space()
            self.add_key(key)
            yield from self._value(1)
            if (yield from self.space()) != ")":
                yield from self.literal(",")
        self.step()
        self.end_members()

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
            self.deliver(scalar(word))

    def _container(self, closer: str, depth: int) -> Steps[None]:
        self.deliver(self.step())
        is_first = True
        while (yield from self.space()) != closer:
            if not is_first:
                self.deliver(", ")
            is_first = False
            if closer == "}":
                yield from self._member_key()
            yield from self._value(depth + 1)
            if (yield from self.space()) != closer:
                yield from self.literal(",")
        self.deliver(self.step())

    def _member_key(self) -> Steps[None]:
        if (yield from self.peek()) not in ('"', "'"):
            raise Malformed
        yield from self._string()
        yield from self.space()
        yield from self.literal(":")
        self.deliver(": ")
        yield from self.space()

    def _string(self) -> Steps[None]:
        quote = self.step()
        self.deliver('"')
        while (char := (yield from self.peek())) != quote:
            if char == "\\":
                yield from self._escape()
            elif text := self.run(_STRING_RUNS[quote]):
                self.deliver(quoted(text))
            else:
                raise Malformed
        self.step()
        self.deliver('"')

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
            self.deliver(f"\\u{digits}")  # may be half of a pair
        elif digits:
            self.deliver(quoted(_character(digits)))
        elif kind in ("\\", '"', "'", "/"):
            self.deliver(quoted(kind))
        else:
            self.deliver(quoted(_ESCAPES.get(kind, f"\\{kind}")))


def _character(digits: str) -> str:
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise Malformed
    return chr(code)
