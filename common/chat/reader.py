"""Reads text that arrives in pieces, as one text: a reader's methods wait for the next piece where they need it.

A method that may wait is a generator that yields when it has read all text so far. What it reads is *held* until it
is flushed to where it belongs, so that text which turns out not to be markup can still become content. Reading is
linear in the text: only markers are read twice.
"""

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

SPACE = re.compile(r"\s+")


class Malformed(Exception):
    """The text that is read is not what was expected."""


class Reader:
    """Text that arrives in pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._has_ended = False
        self._held: list[str] = []

    def add(self, text: str) -> None:
        """Append text. Everything before has been read."""
        self._text, self._pos = self._text[self._pos :] + text, 0

    def end(self) -> None:
        """Mark the end of the text."""
        self._has_ended = True

    def on_wait(self) -> None:
        """Do what cannot wait for the next piece."""

    @property
    def has_more(self) -> bool:
        """Whether there is text that has not been read."""
        return self._pos < len(self._text)

    @property
    def num_held(self) -> int:
        """Pieces of text that are held."""
        return len(self._held)

    def held(self, start: int = 0) -> str:
        """Return the text that is held, from a piece on."""
        return "".join(self._held[start:])

    def drop_held(self, end: int | None = None) -> str:
        """Forget the text that is held, up to a piece, and return it: it is markup, or delivered."""
        dropped = "".join(self._held[:end])
        del self._held[:end]
        return dropped

    def more(self) -> Steps[bool]:
        """Return whether there is another character."""
        while self._pos == len(self._text):
            if self._has_ended:
                return False
            self.on_wait()
            yield
        return True

    def peek(self) -> Steps[str]:
        """Return the next character; empty at the end."""
        there = yield from self.more()
        return self._text[self._pos] if there else ""

    def step(self) -> str:
        """Read the next character, which is there."""
        char = self._text[self._pos]
        self._pos += 1
        self._held.append(char)
        return char

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read what matches here, as far as text is there; empty when nothing does."""
        match = pattern.match(self._text, self._pos)
        if match is None:
            return ""
        self._pos = match.end()
        self._held.append(match.group())
        return match.group()

    def whole(self, pattern: re.Pattern[str], *, max_chars: int | None = None) -> Steps[str]:
        """Read the longest run of a repeated class of characters. Raises Malformed when it is too long."""
        pieces, num_chars = [], 0
        while (yield from self.more()) and (piece := self.run(pattern)):
            pieces.append(piece)
            num_chars += len(piece)
            if max_chars is not None and num_chars > max_chars:
                raise Malformed
        return "".join(pieces)

    def space(self) -> Steps[str]:
        """Read whitespace and return the character after it; empty at the end."""
        while (yield from self.more()) and self.run(SPACE):
            pass
        return (yield from self.peek())

    def literal(self, expected: str) -> Steps[None]:
        """Read a text. Raises Malformed, with nothing read, when another one is there."""
        for num_read, wanted in enumerate(expected):
            char = yield from self.peek()
            if char != wanted:
                self._unread(num_read)
                raise Malformed
            self.step()

    def is_ahead(self, expected: str) -> Steps[bool]:
        """Return whether a text comes next, and leave it there."""
        try:
            yield from self.literal(expected)
        except Malformed:
            return False
        self._unread(len(expected))
        return True

    def _unread(self, num_chars: int) -> None:
        """Put back characters that were read one by one."""
        if not num_chars:
            return
        if num_chars <= self._pos:
            self._pos -= num_chars
        else:
            self._text, self._pos = "".join(self._held[-num_chars:]) + self._text[self._pos :], 0
        del self._held[-num_chars:]
