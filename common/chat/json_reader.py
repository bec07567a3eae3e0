"""Reads JSON as models write it, and writes it as JSON: small faults are mended while it streams.

Mended are control characters and escapes that JSON does not have, a comma before a closing bracket, single quotes, and
numbers and constants as Python spells them. All else comes out as it was written, byte for byte.
"""

import json
import re

from common.chat.reader import Malformed, Reader, Steps

MAX_DEPTH = 64
"""Most levels of objects and lists in arguments."""
_NUM_ENCODINGS = 3
"""Most times that arguments may have been encoded as text."""

_SPACE = re.compile(r"[ \t\r\n]+")
_STRING_RUNS = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"""[^'"\\\x00-\x1f]+""")}
SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z_]+")
_HEX = re.compile(r"[0-9a-fA-F]")
_NUMBER = re.compile(r"([-+]?)(?:(0|[1-9][0-9]*)(\.[0-9]*)?|(\.[0-9]+))((?:[eE][-+]?[0-9]+)?)")
_CONSTANTS = {
    **dict.fromkeys(("true", "True"), "true"),
    **dict.fromkeys(("false", "False"), "false"),
    **dict.fromkeys(("null", "None", "NaN", "Infinity", "-Infinity", "undefined"), "null"),
}


class JsonReader(Reader):
    """Text with JSON in it. What is held of it is *covered* once it has been written as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._json: list[str] = []
        self._num_covered = 0
        """Pieces of the text that is held whose JSON is written."""
        self.missing = ""
        """Brackets that would have closed the object at which reading failed; empty where these are not enough."""

    def take_json(self) -> str:
        """Return the JSON written since the last call."""
        taken = "".join(self._json)
        self._json.clear()
        return taken

    def drop_held(self, end: int | None = None) -> str:
        """Forget the text that is held, up to a piece, and return it."""
        self._num_covered = 0
        return super().drop_held(end)

    def drop_covered(self) -> str:
        """Forget the text whose JSON is written, and return it."""
        return self.drop_held(self._num_covered)

    def json_object(self) -> Steps[None]:
        """Read a JSON object. Raises Malformed, also below MAX_DEPTH levels."""
        self.missing = ""
        yield from self.literal("{")
        self.write("{")
        closers, comma, follows_value = ["}"], "", False
        while closers:
            space = comma + (yield from self.json_space())
            char = yield from self.peek()
            if char == closers[-1]:
                self.step()
                self.write(space.replace(",", "") + closers.pop())
                comma, follows_value = "", True
            elif follows_value:
                self.missing = "".join(reversed(closers))
                yield from self.literal(",")
                self.missing = ""
                comma, follows_value = space + ",", False
            else:
                self.write(space)
                comma = ""
                if closers[-1] == "}":
                    char = yield from self._member()
                if char in ("{", "["):
                    if len(closers) == MAX_DEPTH:
                        raise Malformed
                    self.write(self.step())
                    closers.append("}" if char == "{" else "]")
                else:
                    yield from self._scalar(char)
                    follows_value = True

    def wrapped_object(self) -> Steps[None]:
        """Read an object that was encoded as text, or what stands for none, and write the object. Raises Malformed."""
        char = yield from self.peek()
        num_written = len(self._json)
        yield from self._scalar(char)
        found = object_in("".join(self._json[num_written:]))
        if found is None:
            raise Malformed
        self._json[num_written:] = [found]

    def json_space(self) -> Steps[str]:
        """Read JSON's whitespace."""
        return (yield from self.whole(_SPACE))

    def json_string(self) -> Steps[None]:
        """Read a string. Raises Malformed."""
        quote = yield from self.peek()
        if quote not in _STRING_RUNS:
            raise Malformed
        self.step()
        self.write('"')
        while (char := (yield from self.peek())) != quote:
            if char == "\\":
                yield from self._escape()
            elif text := self.run(_STRING_RUNS[quote]):
                self.write(text)
            elif char:
                self.write(quoted(self.step()))
            else:
                raise Malformed
        self.step()
        self.write('"')

    def write(self, text: str) -> None:
        """Write JSON in place of the text that is held."""
        self._json.append(text)
        self._num_covered = self.num_held

    def _member(self) -> Steps[str]:
        """Read a member's key and its colon, and return the character with which its value begins."""
        yield from self.json_string()
        space = yield from self.json_space()
        yield from self.literal(":")
        space += ":" + (yield from self.json_space())
        self.write(space)
        return (yield from self.peek())

    def _scalar(self, char: str) -> Steps[None]:
        if char in _STRING_RUNS:
            yield from self.json_string()
        else:
            self.write(scalar((yield from self.whole(SCALAR_RUN))))

    def _escape(self) -> Steps[None]:
        """Read an escape. A backslash before anything that JSON does not escape is one itself."""
        self.step()
        kind = yield from self.peek()
        if not kind:
            raise Malformed
        if kind == "'":
            self.write(self.step())
        elif kind in '"\\/bfnrt':
            self.write("\\" + self.step())
        elif kind == "u":
            self.step()
            digits = ""
            while len(digits) < 4 and _HEX.match((yield from self.peek())):
                digits += self.step()
            self.write(f"\\u{digits}" if len(digits) == 4 else f"\\\\u{digits}")
        else:
            self.write("\\\\")


def object_in(text: str) -> str | None:
    """Return the JSON object that a text spells, with small faults mended and encoded however often; None for none.

    Empty text and null stand for an empty object.
    """
    for _ in range(_NUM_ENCODINGS):
        if text.strip() in ("", "null"):
            return "{}"
        reader = JsonReader()
        reader.add(text.strip())
        reader.end()
        is_text = text.lstrip().startswith('"')
        steps = reader.json_string() if is_text else reader.json_object()
        try:
            next(steps, None)
        except Malformed:
            return None
        if reader.has_more:
            return None
        text = reader.take_json()
        if not is_text:
            return text
        text = json.loads(text)
    return None


def quoted(text: str) -> str:
    """Return what stands for a text within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def scalar(word: str) -> str:
    """Return a number or a constant, perhaps Python's, as JSON. Raises Malformed."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    match = _NUMBER.fullmatch(word)
    if match is None:
        raise Malformed
    sign, whole, fraction, only_fraction, exponent = match.groups()
    digits = f"0{only_fraction}" if only_fraction else f"{whole}{fraction or ''}"
    return f"{sign.strip('+')}{digits}{'0' if digits.endswith('.') else ''}{exponent}"
