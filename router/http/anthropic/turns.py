"""Reads the conversation of a body: content blocks become messages of a chat.

A message of tool results becomes one `tool` message each, in order, with a `user` message for the text between them. An
assistant's message stays one: its text, its thoughts and its calls. Members of messages and blocks that say nothing to
a model are left unread.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from common.errors import InvalidRequest
from router.http.anthropic.schema import UNREAD_BLOCKS
from router.http.contents import MAX_KIND_CHARS, entries_in, parts_in, role_in, text_in, unseen

ERROR_PREFIX = "Error: "
"""Begins the result of a tool that failed: chat templates know of no failures."""

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""First line of Claude Code's instructions: another one in each request, so that no request would find its prefix."""
_Block = tuple[str, dict[str, Any]]
"""Place of a block in the body, and its members."""


def read_turns(system: Any, messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat, with OpenAI's members. Raises InvalidRequest that names the place."""
    turns: list[dict[str, Any]] = []
    if instructions := _instructions(_text(system, "system")) if system is not None else "":
        turns.append({"role": "system", "content": instructions})
    called: dict[str, str] = {}
    for where, message in entries_in(messages, "messages"):
        turns += _turns(message, where, called)
    return turns


def _turns(message: Mapping[str, Any], where: str, called: dict[str, str]) -> list[dict[str, Any]]:
    """Return the messages for one; `called` has the tools' names by the ids of their calls."""
    role, content = role_in(message, where, _READERS), message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    read, kinds = _READERS[role]
    return read(_blocks(content, f"{where}.content", kinds), called)


def _asked(blocks: Iterable[_Block], called: dict[str, str]) -> list[dict[str, Any]]:
    """Return the messages for one of the user."""
    turns: list[dict[str, Any]] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            turns.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for where, block in blocks:
        if block["type"] == "text":
            texts.append(text_in(block, "text", where))
        else:
            end_text()
            turns.append(_result(block, where, called))
    end_text()
    return turns or [{"role": "user", "content": ""}]


def _result(block: dict[str, Any], where: str, called: Mapping[str, str]) -> dict[str, Any]:
    """Return the message for a tool's result."""
    call_id = _name(block, "tool_use_id", where)
    content = block.get("content")
    text = "" if content is None else _returned(content, f"{where}.content")
    is_error = block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise InvalidRequest(f"{where}.is_error must be true or false", field=f"{where}.is_error")
    return {
        "role": "tool",
        "content": ERROR_PREFIX + text if is_error else text,
        "tool_call_id": call_id,
        "name": called.get(call_id),
    }


def _answered(blocks: Iterable[_Block], called: dict[str, str]) -> list[dict[str, Any]]:
    """Return the message for one of the assistant."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        match block["type"]:
            case "text":
                texts.append(text_in(block, "text", where))
            case "thinking":
                thoughts.append(text_in(block, "thinking", where))
            case "tool_use":
                call = _call(block, where)
                calls.append(call)
                called[call["id"]] = call["function"]["name"]
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts), "reasoning": "\n".join(thoughts)}
    return [turn | {"tool_calls": calls} if calls else turn]


def _system(blocks: Iterable[_Block], called: dict[str, str]) -> list[dict[str, Any]]:
    """Return the message for one of the system."""
    text = "\n".join(text_in(block, "text", where) for where, block in blocks)
    return [{"role": "system", "content": _instructions(text)}]


def _instructions(text: str) -> str:
    """Return what the system says to the model."""
    return _BILLING.sub("", text)


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where}.input must be an object", field=f"{where}.input")
    function = {"name": _name(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _name(block, "id", where), "type": "function", "function": function}


def _text(content: Any, where: str) -> str:
    """Return content that is text only."""
    if isinstance(content, str):
        return content
    return "\n".join(text_in(block, "text", here) for here, block in _blocks(content, where, ("text",)))


def _returned(content: Any, where: str) -> str:
    """Return what a tool has returned as text."""
    if isinstance(content, str):
        return content
    return "\n".join(
        text_in(block, "text", here) if block["type"] == "text" else unseen(block["type"])
        for here, block in _blocks(content, where, None)
    )


def _blocks(content: Any, where: str, kinds: tuple[str, ...] | None) -> Iterator[_Block]:
    """Yield the checked blocks of some content, all of these kinds; None: any."""
    for here, kind, block in parts_in(content, where):
        if kinds is not None and kind not in kinds:
            name = f"{here}.type"
            raise InvalidRequest(
                f"{name}: {kind[:MAX_KIND_CHARS]} is not supported here, only {', '.join(kinds)}", field=name
            )
        yield here, block


def _name(block: dict[str, Any], name: str, where: str) -> str:
    """Return a member that is text and not empty."""
    value = text_in(block, name, where)
    if not value:
        raise InvalidRequest(f"{where}.{name} must not be empty", field=f"{where}.{name}")
    return value


_Reader = Callable[[Iterable[_Block], dict[str, str]], list[dict[str, Any]]]
_READERS: Mapping[str, tuple[_Reader, tuple[str, ...]]] = {
    "user": (_asked, ("text", "tool_result")),
    "assistant": (_answered, ("text", "thinking", "tool_use", *UNREAD_BLOCKS)),
    "system": (_system, ("text",)),
}
"""Readers of a message's blocks, and the kinds of these, by role."""
