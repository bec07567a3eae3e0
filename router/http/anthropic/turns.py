"""Reads the conversation of a body: content blocks become messages of a chat.

A message of tool results becomes one `tool` message each, in order, with a `user` message for the text between them. An
assistant's message stays one: its text, its thoughts and its calls.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from common.errors import InvalidRequest
from common.wire import MAX_CHAT_MESSAGES, MAX_CONTENT_PARTS, check_length
from router.http.strict import field_path

ERROR_PREFIX = "Error: "
"""Begins the result of a tool that failed: chat templates know of no failures."""

_Block = tuple[str, dict[str, Any]]
"""Place of a block in the body, and its members."""
_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
"""Members of the blocks that are read, beside `type` and `cache_control`."""
_MAX_NAME_CHARS = 40


def read_turns(system: Any, messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat, with OpenAI's members. Raises InvalidRequest that names the place."""
    turns: list[dict[str, Any]] = []
    if instructions := _text(system, "system") if system is not None else "":
        turns.append({"role": "system", "content": instructions})
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", field="messages")
    check_length(len(messages), MAX_CHAT_MESSAGES, field="messages")
    called: dict[str, str] = {}
    for position, message in enumerate(messages):
        turns += _turns(message, field_path("messages", position), called)
    return turns


def _turns(message: Any, where: str, called: dict[str, str]) -> list[dict[str, Any]]:
    """Return the messages for one; `called` has the tools' names by the ids of their calls."""
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", field=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _READERS:
        raise InvalidRequest(f"{where}.role must be user or assistant; see system", field=f"{where}.role")
    _check_members(message, ("role", "content"), where)
    content, here = message.get("content"), f"{where}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    read, kinds = _READERS[role]
    return read(_blocks(content, here, kinds), called)


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
            texts.append(_member(block, "text", where))
        else:
            end_text()
            turns.append(_result(block, where, called))
    end_text()
    return turns


def _result(block: dict[str, Any], where: str, called: Mapping[str, str]) -> dict[str, Any]:
    """Return the message for a tool's result."""
    call_id = _name(block, "tool_use_id", where)
    content = block.get("content")
    text = "" if content is None else _text(content, f"{where}.content")
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
                texts.append(_member(block, "text", where))
            case "thinking":
                thoughts.append(_member(block, "thinking", where))
            case "redacted_thinking":
                _member(block, "data", where)  # encrypted: cannot be read here
            case "tool_use":
                call = _call(block, where)
                calls.append(call)
                called[call["id"]] = call["function"]["name"]
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts), "reasoning": "\n".join(thoughts)}
    return [turn | {"tool_calls": calls} if calls else turn]


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
    return "\n".join(_member(block, "text", here) for here, block in _blocks(content, where, ("text",)))


def _blocks(content: Any, where: str, kinds: tuple[str, ...]) -> list[_Block]:
    """Return the checked blocks of some content, all of these kinds."""
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be text or a list of at least one block", field=where)
    check_length(len(content), MAX_CONTENT_PARTS, field=where)
    blocks: list[_Block] = []
    for position, block in enumerate(content):
        here = field_path(where, position)
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"{here} must be an object with a type", field=here)
        if kind not in kinds:
            name = f"{here}.type"
            raise InvalidRequest(
                f"{name}: {kind[:_MAX_NAME_CHARS]} is not supported here, only {', '.join(kinds)}", field=name
            )
        _check_members(block, ("type", "cache_control", *_MEMBERS[kind]), here)
        blocks.append((here, block))
    return blocks


def _check_members(given: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            field = f"{where}.{name[:_MAX_NAME_CHARS]}"
            raise InvalidRequest(f"{field} is unknown here", field=field)


def _member(block: dict[str, Any], name: str, where: str) -> str:
    """Return a member that is text."""
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be text", field=f"{where}.{name}")
    return value


def _name(block: dict[str, Any], name: str, where: str) -> str:
    """Return a member that is text and not empty."""
    value = _member(block, name, where)
    if not value:
        raise InvalidRequest(f"{where}.{name} must not be empty", field=f"{where}.{name}")
    return value


_Reader = Callable[[Iterable[_Block], dict[str, str]], list[dict[str, Any]]]
_READERS: Mapping[str, tuple[_Reader, tuple[str, ...]]] = {
    "user": (_asked, ("text", "tool_result")),
    "assistant": (_answered, ("text", "thinking", "redacted_thinking", "tool_use")),
}
"""Readers of a message's blocks, and the kinds of these, by role."""
