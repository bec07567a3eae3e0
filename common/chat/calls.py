"""Reads answers with tool calls: what all syntaxes share, and calls that are JSON objects of name and arguments.

A call is announced when its name is known and its arguments begin, and these go on as they come. From there it stays a
call: when its text turns out not to be JSON, its rest is delivered as it is, and the call counts as broken. Until then
all of it is content.
"""

import json
import re
from abc import ABC, abstractmethod

from common.chat.deltas import Collector
from common.chat.formats import MAX_TOOL_NAME_CHARS, Syntax, ToolFormat
from common.chat.json_reader import JsonReader
from common.chat.reader import SPACE, Malformed, Steps

NAME_RUN = re.compile(r"[A-Za-z0-9_.-]+")
_KEYS = ("name", "arguments", "parameters", "id", "type")


class CallReader(JsonReader, ABC):
    """Reads an answer with calls in one format; subclasses know a syntax."""

    def __init__(self, out: Collector, markup: ToolFormat) -> None:
        super().__init__()
        self._out = out
        self.format = markup
        self._is_streaming = False
        self._is_open = False
        """Whether a call has been announced and not been completed."""
        self._follows_call = False
        opening, closing = self.format.opening, self.format.closing
        self._plain = re.compile(rf"[^\s{re.escape(opening[0])}]+")
        self._inner = re.compile(rf"[^{re.escape(opening[0] + closing[:1])}]+")

    def on_wait(self) -> None:
        """Deliver arguments."""
        if self._is_streaming:
            self._release_arguments()

    def read(self) -> Steps[None]:
        """Read the whole answer."""
        if self.format.bare and (yield from self.space()) == self.format.bare:
            yield from self._attempt(self.bare_calls())
        while (yield from self.more()):
            if self.run(self._plain):
                self._flush()
            elif not self.run(SPACE):
                if (yield from self.optional(self.format.opening)):
                    yield from self._attempt(self.marked_calls())
                else:
                    self.step()
                    self._flush()
        if self.held().strip() or not self._follows_call:
            self._flush()
        self.drop_markup()

    @abstractmethod
    def marked_calls(self) -> Steps[None]:
        """Read what follows the opening marker. Raises Malformed."""

    def bare_calls(self) -> Steps[None]:
        """Read calls that begin an answer without a marker, where the format has such. Raises Malformed."""
        yield from ()
        raise Malformed

    def optional(self, literal: str) -> Steps[bool]:
        """Read a text when it comes next, and return whether it did."""
        try:
            yield from self.literal(literal)
        except Malformed:
            return False
        return True

    def _attempt(self, calls: Steps[None]) -> Steps[None]:
        """Read calls; text that is not a call becomes content, space after a call remains held."""
        try:
            yield from calls
        except Malformed:
            if self._is_open:
                yield from self._broken_call()
            elif self.held().strip():
                self._flush()

    def _broken_call(self) -> Steps[None]:
        """Deliver the rest of a call as it is, up to the marker that closes calls or opens others."""
        self._is_open, self._follows_call = False, True
        closing = self.format.closing
        while True:
            rest = self.drop_held()
            self._out.add_arguments(rest)
            self._out.add_markup(rest)
            if not (yield from self.more()) or (yield from self.is_ahead(self.format.opening)):
                return
            if self.run(self._inner):
                continue
            if closing and (yield from self.optional(closing)):
                self.drop_markup()
                return
            self.step()

    def _flush(self) -> None:
        self._out.add_content(self.drop_held())
        self._follows_call = False

    def _release_arguments(self) -> None:
        self._out.add_arguments(self.take_json())
        self._out.add_markup(self.drop_covered())

    def drop_markup(self) -> None:
        """Forget the text that is held: it is markup."""
        self._out.add_markup(self.drop_held())

    def begin(self, name: str) -> None:
        """Announce a call. What is held is its markup."""
        self._out.begin_call(name)
        self._is_open = True
        self.drop_markup()

    def complete(self) -> None:
        """Note that a call has been read. What is held is its markup."""
        if self._is_open:
            self._out.end_call()
        self._is_open, self._follows_call = False, True
        self.drop_markup()

    def closing(self, marker: str) -> Steps[bool]:
        """Read a closing marker, if there is one, when it comes next, space aside, and return whether it did."""
        yield from self.space()
        found = bool(marker) and (yield from self.optional(marker))
        if found:
            self.drop_markup()
        return found

    def markup(self, text: str) -> Steps[None]:
        """Read a text of the format with any space around its parts. Raises Malformed."""
        for part in text.split():
            yield from self.space()
            yield from self.literal(part)

    def name(self) -> Steps[str]:
        """Read a tool's name, without the namespace. Raises Malformed."""
        namespace = self.format.namespace
        name = yield from self.whole(NAME_RUN, max_chars=MAX_TOOL_NAME_CHARS + len(namespace))
        name = name.removeprefix(namespace)
        if not 0 < len(name) <= MAX_TOOL_NAME_CHARS:
            raise Malformed
        return name

    def arguments(self, name: str) -> Steps[None]:
        """Read the arguments of a call and deliver them as they come. Raises Malformed."""
        self.take_json()
        if (yield from self.space()) == "{":
            self.begin(name)
            self._is_streaming = True
            try:
                yield from self._object()
            finally:
                self._release_arguments()
                self._is_streaming = False
        else:
            yield from self.wrapped_object()
            self.begin(name)
            self._out.add_arguments(self.take_json())
        self.complete()

    def _object(self) -> Steps[None]:
        """Read an object, which ends without its brackets where a marker follows. Raises Malformed."""
        try:
            yield from self.json_object()
        except Malformed:
            if not self.missing or not (yield from self._is_before_marker()):
                raise
            self.write(self.missing)

    def _is_before_marker(self) -> Steps[bool]:
        for marker in self.format.markers:
            if (yield from self.is_ahead(marker)):
                return True
        return False


class ObjectReader(CallReader):
    """Calls as objects, each between markers, in a list, or separated by semicolons or space."""

    def marked_calls(self) -> Steps[None]:
        """Read the calls and the closing marker."""
        if (yield from self.space()) == "[" and self.format.is_list:
            yield from self.listed_calls()
            return
        yield from self.bare_calls()
        while (yield from self.space()) == "}":  # one bracket too many
            self.step()
        yield from self.closing(self.format.closing)

    def bare_calls(self) -> Steps[None]:
        """Read objects up to a character that begins none."""
        yield from self.json_call()
        while True:
            char = yield from self.space()
            if char == ";" and self.format.bare:
                self.step()
                char = yield from self.space()
            if char != "{":
                return
            yield from self.json_call()

    def listed_calls(self) -> Steps[None]:
        """Read a list of objects."""
        separator = "["
        while separator != "]":
            yield from self.literal(separator)
            yield from self.space()
            yield from self.json_call()
            separator = "]" if (yield from self.space()) == "]" else ","
        yield from self.closing("]")

    def json_call(self) -> Steps[None]:
        """Read an object of a call's name and arguments, in any order. Raises Malformed."""
        yield from self.literal("{")
        name, early_arguments, keys = "", "", list(_KEYS)
        while True:
            yield from self.json_space()
            is_read = bool(name) and "arguments" not in keys
            if is_read and (yield from self._is_before_marker()):
                break
            if len(keys) < len(_KEYS) and (yield from self.optional(",")):
                yield from self.json_space()
            elif len(keys) < len(_KEYS) or (yield from self.peek()) == "}":
                yield from self.literal("}")
                break
            if (yield from self.optional("}")):
                break
            key = yield from self._key(keys)
            if key == "name":
                yield from self.literal('"')
                name = yield from self.name()
                yield from self.literal('"')
                if early_arguments:
                    self.begin(name)
                    self._out.add_arguments(early_arguments)
            elif key not in ("arguments", "parameters"):
                yield from self.json_string()
            elif name:
                yield from self.arguments(name)
            else:
                self.take_json()
                yield from self.json_object() if (yield from self.peek()) == "{" else self.wrapped_object()
                early_arguments = self.take_json()
        if not name or "arguments" in keys:
            raise Malformed
        self.complete()

    def _key(self, allowed: list[str]) -> Steps[str]:
        """Read one of some keys, which are then no longer allowed, and its colon. Raises Malformed."""
        yield from self.literal('"')
        key = ""
        while (char := (yield from self.peek())) != '"' or key not in allowed:
            key += char
            if not char or not any(each.startswith(key) for each in allowed):
                raise Malformed
            self.step()
        self.step()
        for each in ("arguments", "parameters") if key in ("arguments", "parameters") else (key,):
            allowed.remove(each)
        yield from self.json_space()
        yield from self.literal(":")
        yield from self.json_space()
        return key


class MemberReader(CallReader, ABC):
    """Calls whose arguments are written one by one, and become the members of an object."""

    def __init__(self, out: Collector, markup: ToolFormat) -> None:
        super().__init__(out, markup)
        self._unannounced: str | None = None
        """Name of a call that none of its arguments has followed."""
        self._before = ""
        """JSON that comes before the next value."""
        self._keys: set[str] = set()

    def begin_members(self, name: str) -> None:
        """Begin a call, which is announced with its first value."""
        self._unannounced, self._before, self._keys = name, "{", set()

    def add_key(self, key: str) -> None:
        """Begin a member. Raises Malformed for a second one of its name."""
        if key in self._keys:
            raise Malformed
        self._before = f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: "
        self._keys.add(key)

    def deliver(self, text: str) -> None:
        """Deliver JSON in place of the text that is held."""
        if self._unannounced is not None:
            self.begin(self._unannounced)
            self._unannounced = None
        self._out.add_arguments(self._before + text)
        self._before = ""
        self.drop_markup()

    def end_members(self) -> None:
        """End the call."""
        self.deliver("}")
        self.complete()


class ArgumentsReader(CallReader):
    """An answer that is nothing but the arguments of one call."""

    def __init__(self, out: Collector, name: str) -> None:
        super().__init__(out, ToolFormat(name="", syntax=Syntax.JSON, opening="\0", bare="{"))
        self._name = name

    def marked_calls(self) -> Steps[None]:
        """Refuse: there is no marker."""
        raise Malformed
        yield

    def bare_calls(self) -> Steps[None]:
        """Read the arguments."""
        yield from self.arguments(self._name)
