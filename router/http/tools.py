"""Reads the tools of a chat's body and `tool_choice`, in the forms of OpenAI's two APIs.

A model is told of functions alone. Tools of other types (`web_search`, `custom`, `mcp`, …) run elsewhere: a request
with them is answered without them, unless its `tool_choice` names one.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from common.wire import MAX_TOOLS, check_length
from common.wire_names import TOOL_CHOICE_NUMBERS
from kvrelay.v1 import inference_pb2 as pb
from router.http.strict import check_members, field_path

Tool = Mapping[str, Any]
_KINDS: Mapping[str, Any] = TOOL_CHOICE_NUMBERS | {"any": pb.TOOL_CHOICE_KIND_REQUIRED}
_MODES = ("auto", "required")
_WANTED = (
    'tool_choice must be none, auto, required, {"type": "function", "function": {"name": …}} or'
    ' {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A tool choice, and the functions that it allows."""

    kind: "pb.ToolChoiceKind.ValueType" = pb.TOOL_CHOICE_KIND_UNSPECIFIED
    name: str = ""
    """The function that has to be called."""
    allowed: Collection[str] | None = None
    """Functions that may be called; None: all."""

    def told(self, tools: Sequence[Tool]) -> list[str]:
        """Return the tools for the model, as JSON. Raises InvalidRequest for an allowed one that is not among them."""
        names = {_name_of(tool) for tool in tools if not is_foreign(tool)}
        if missing := sorted(set(self.allowed or ()) - names):
            raise _refusal(f"tool_choice allows {missing[0][:80]!r}, which is not among the tools")
        return [
            # Of one that is left out, its type alone, in its place: errors name tools by their places.
            json.dumps({"type": tool["type"]} if is_foreign(tool) else tool, ensure_ascii=False)
            for tool in tools
            if self.allowed is None or is_foreign(tool) or _name_of(tool) in self.allowed
        ]


def is_foreign(tool: Tool) -> bool:
    """Whether a tool is of a type that no model is told of."""
    return isinstance(tool.get("type"), str) and tool["type"] != "function"


def foreign_tools(tools: Sequence[Tool]) -> list[str]:
    """Return the places of tools that are left out."""
    return [field_path("tools", position) for position, tool in enumerate(tools) if is_foreign(tool)]


def read_choice(given: Any) -> Choice:
    """Return the choice of a body; the model's own without one. Raises InvalidRequest."""
    if given is None:
        return Choice()
    kind = given if isinstance(given, str) else given.get("type")
    if not isinstance(kind, str):
        raise _refusal(_WANTED)
    if isinstance(given, str):
        given = {"type": given}
    if kind == "allowed_tools":
        return _allowed(given)
    if kind == "function":
        check_members(given, ("type", "name", "function"), "tool_choice")
        if (name := _name_of(given)) is None:
            raise _refusal(_WANTED)
        return Choice(kind=pb.TOOL_CHOICE_KIND_NAMED, name=name)
    if kind in _KINDS:
        check_members(given, ("type",), "tool_choice")
        return Choice(kind=_KINDS[kind])
    raise _refusal(f"{_WANTED}; {kind[:80]} is none of these")


def _allowed(given: Mapping[str, Any]) -> Choice:
    """Return the choice among some of the tools. Raises InvalidRequest."""
    inner = given.get("allowed_tools")
    choice = inner if isinstance(inner, dict) else given
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in _MODES or not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _refusal(_WANTED)
    check_length(len(tools), MAX_TOOLS, field="tool_choice")
    names = [_name_of(tool) for tool in tools if not is_foreign(tool)]
    if None in names:
        raise _refusal(_WANTED)
    return Choice(kind=_KINDS[mode], allowed=frozenset(filter(None, names)))


def _name_of(tool: Tool) -> str | None:
    """Return the name of a function, which is an object of its own in one of the two APIs."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else None


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="tool_choice")
