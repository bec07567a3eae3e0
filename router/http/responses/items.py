"""Reads `input`: items become the messages of a chat.

An assistant's turn is several items here, and one message of a chat: reasoning, then text, then calls of tools.
"""

from typing import Any

from common.errors import InvalidRequest
from common.wire import MAX_CHAT_MESSAGES, MAX_CONTENT_PARTS, check_length
from router.http.messages import unseen
from router.http.responses.body import INPUT_ROLES, REASONING_TEXTS, UNREAD_ITEMS
from router.http.strict import field_path

Message = dict[str, Any]
_TEXTS = ("input_text", "output_text")


def read_input(given: Any) -> list[Message]:
    """Return the messages of a conversation, in the form of a chat's body. Raises InvalidRequest with the place."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be text or a list of at least one item", field="input")
    check_length(len(given), MAX_CHAT_MESSAGES, field="input")
    turns = _Turns()
    for position, item in enumerate(given):
        _read(item, field_path("input", position), turns)
    return turns.messages


class _Turns:
    """Messages so far; the last one may be an assistant's turn that goes on."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._is_open = False

    def add(self, message: Message) -> None:
        """Append a complete message."""
        self.messages.append(message)
        self._is_open = False

    def assistant(self, *, without: tuple[str, ...] = ()) -> Message:
        """Return the assistant's turn that goes on; a new one if that has one of some members already."""
        if not self._is_open or any(self.messages[-1].get(name) for name in without):
            self.add({"role": "assistant", "content": ""})
            self._is_open = True
        return self.messages[-1]


def _read(item: Any, where: str, turns: _Turns) -> None:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} must be an object", field=where)
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    match kind:
        case "message":
            _read_message(item, where, turns)
        case "reasoning":
            text = _reasoning(item, where)
            if text:
                turns.assistant(without=("reasoning", "content", "tool_calls"))["reasoning"] = text
        case "function_call":
            function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
            call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
            turns.assistant().setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = _returned(item.get("output"), f"{where}.output")
            turns.add({"role": "tool", "content": content, "tool_call_id": _text(item, "call_id", where)})
        case "item_reference":
            raise InvalidRequest(f"{where} refers to an item: nothing is stored here; send the item", field=where)
        case _ if kind in UNREAD_ITEMS:
            pass
        case _:
            raise InvalidRequest(
                f"{where}.type must be message, reasoning, function_call or function_call_output", field=f"{where}.type"
            )


def _read_message(item: Message, where: str, turns: _Turns) -> None:
    role = item.get("role")
    if role not in INPUT_ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(INPUT_ROLES)}", field=f"{where}.role")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        turns.assistant(without=("content", "tool_calls"))["content"] = content
    else:
        turns.add({"role": role, "content": content})


def _reasoning(item: Message, where: str) -> str:
    """Return the text of a reasoning item, or its summary where it has none; what is encrypted is unread.

    Raises InvalidRequest.
    """
    texts = [
        _joined(item[name], f"{where}.{name}", (kind,))
        for name, kind in REASONING_TEXTS.items()
        if item.get(name) is not None
    ]
    return next(filter(None, texts), "")


def _content(content: Any, where: str) -> str:
    return content if isinstance(content, str) else _joined(content, where, _TEXTS)


def _returned(content: Any, where: str) -> str:
    """Return what a function has returned as text. Raises InvalidRequest."""
    if not isinstance(content, list):
        return _content("" if content is None else content, where)
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content[: MAX_CONTENT_PARTS + 1]]
    parts = [
        {"type": _TEXTS[0], "text": unseen(kind)} if isinstance(kind, str) and kind not in _TEXTS else part
        for part, kind in zip(content, kinds, strict=False)
    ]
    return _joined(parts, where, _TEXTS)


def _joined(parts: Any, where: str, kinds: tuple[str, ...]) -> str:
    """Return the text of all parts. Raises InvalidRequest for parts that are not text."""
    if not isinstance(parts, list):
        raise InvalidRequest(f"{where} must be text or a list of text parts", field=where)
    check_length(len(parts), MAX_CONTENT_PARTS, field=where)
    texts: list[str] = []
    for position, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None
        if not isinstance(text, str):
            here = field_path(where, position)
            wanted = " or ".join(f'"{kind}"' for kind in kinds)
            raise InvalidRequest(f'{here} must be {{"type": {wanted}, "text": …}}', field=here)
        texts.append(text)
    return "\n".join(texts)


def _text(item: Message, name: str, where: str) -> str:
    """Return a member that must be text. Raises InvalidRequest."""
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be text", field=f"{where}.{name}")
    return value
