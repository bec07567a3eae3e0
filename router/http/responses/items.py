"""Reads `input`: items become the messages of a chat.

An assistant's turn is several items here, and one message of a chat: reasoning, then text, then calls of tools.
"""

from typing import Any

from common.errors import InvalidRequest
from router.http.contents import entries_in, joined_texts, role_in, text_in
from router.http.responses.body import INPUT_ROLES, REASONING_TEXTS, UNREAD_ITEMS

Message = dict[str, Any]
_TEXTS = ("input_text", "output_text")


def read_input(given: Any) -> list[Message]:
    """Return the messages of a conversation, in the form of a chat's body. Raises InvalidRequest with the place."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    turns = _Turns()
    for where, item in entries_in(given, "input"):
        _read(item, where, turns)
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


def _read(item: Message, where: str, turns: _Turns) -> None:
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
            function = {"name": text_in(item, "name", where), "arguments": text_in(item, "arguments", where)}
            call = {"id": text_in(item, "call_id", where), "type": "function", "function": function}
            turns.assistant().setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = item.get("output")
            content = _content("" if output is None else output, f"{where}.output", is_result=True)
            turns.add({"role": "tool", "content": content, "tool_call_id": text_in(item, "call_id", where)})
        case "item_reference":
            raise InvalidRequest(f"{where} refers to an item: nothing is stored here; send the item", field=where)
        case _ if kind in UNREAD_ITEMS:
            pass
        case _:
            raise InvalidRequest(
                f"{where}.type must be message, reasoning, function_call or function_call_output", field=f"{where}.type"
            )


def _read_message(item: Message, where: str, turns: _Turns) -> None:
    role, content = role_in(item, where, INPUT_ROLES), _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        turns.assistant(without=("content", "tool_calls"))["content"] = content
    else:
        turns.add({"role": role, "content": content})


def _reasoning(item: Message, where: str) -> str:
    """Return the text of a reasoning item, or its summary where it has none; what is encrypted is unread.

    Raises InvalidRequest.
    """
    texts = [
        joined_texts(item[name], f"{where}.{name}", (kind,))
        for name, kind in REASONING_TEXTS.items()
        if item.get(name) is not None
    ]
    return next(filter(None, texts), "")


def _content(content: Any, where: str, *, is_result: bool = False) -> str:
    return content if isinstance(content, str) else joined_texts(content, where, _TEXTS, is_result=is_result)
