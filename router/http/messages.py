"""Reads the conversation of a chat's body: messages, tools, and what has to be called."""

import json
from typing import Any

from common.errors import InvalidRequest
from common.wire import MAX_CHAT_MESSAGES, MAX_CONTENT_PARTS, MAX_TOOLS, check_length
from kvrelay.v1 import inference_pb2 as pb
from router.http.schema import MESSAGE_TEXTS, ROLES, SILENT_ROLES, ChatBody
from router.http.strict import field_path
from router.http.tools import read_choice

_MAX_BUDGET = (1 << 32) - 1
MAX_KIND_CHARS = 40


def read_chat_prompt(body: ChatBody) -> pb.ChatPrompt:
    """Return the prompt of a chat. Raises InvalidRequest that names the field."""
    continues = bool(body.continue_final_message)
    if not continues and body.add_generation_prompt is False:
        raise InvalidRequest(
            "add_generation_prompt: false needs continue_final_message: true", field="add_generation_prompt"
        )
    choice = read_choice(body.tool_choice)
    chat = pb.ChatPrompt(
        messages=read_messages(body.messages),
        tools=choice.told(body.tools or ()),
        tool_choice=pb.ToolChoice(kind=choice.kind, name=choice.name, is_single=body.parallel_tool_calls is False),
        template_variables=_template_variables(body),
        continue_final_message=continues,
    )
    if body.thinking_budget is not None:
        if not 0 <= body.thinking_budget <= _MAX_BUDGET:
            raise InvalidRequest(f"thinking_budget is {body.thinking_budget}", field="thinking_budget")
        chat.thinking_budget = body.thinking_budget
    return chat


def _template_variables(body: ChatBody) -> str:
    """Return the variables of the chat template as JSON; the effort is one, which most templates do not read."""
    effort, variables = body.reasoning_effort, dict[str, Any]()
    if effort is not None:
        variables = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    variables |= body.chat_template_kwargs or {}
    return json.dumps(variables) if variables else ""


def read_messages(messages: Any) -> list[pb.ChatMessage]:
    """Return a conversation. Raises InvalidRequest that names the place."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", field="messages")
    check_length(len(messages), MAX_CHAT_MESSAGES, field="messages")
    return [_message(message, position) for position, message in enumerate(messages)]


def _message(message: Any, position: int) -> pb.ChatMessage:
    where = field_path("messages", position)
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", field=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", field=f"{where}.role")
    for name in ("function_call", "audio"):
        if message.get(name):
            raise InvalidRequest(f"{where}.{name} is not supported", field=f"{where}.{name}")
    if message.get("tool_calls") and role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls: only an assistant calls tools", field=f"{where}.tool_calls")
    calls = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    texts = {name: _text(message, name, where) for name in MESSAGE_TEXTS}
    return pb.ChatMessage(
        role=ROLES[role],
        content=_content(message.get("content"), f"{where}.content", role),
        tool_calls=calls,
        tool_call_id=texts["tool_call_id"] if role == "tool" else "",
        name=texts["name"] if role == "tool" else "",
        reasoning=texts["reasoning"] or texts["reasoning_content"],
    )


def _tool_calls(given: Any, where: str) -> list[pb.ToolCall]:
    """Return the calls of an assistant's message. Raises InvalidRequest."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise InvalidRequest(f"{where} must be a list", field=where)
    check_length(len(given), MAX_TOOLS, field=where)
    calls = []
    for position, call in enumerate(given):
        here = field_path(where, position)
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type") not in ("function", None):
            raise InvalidRequest(f'{here} must be {{"id": …, "type": "function", "function": {{…}}}}', field=here)
        inner = f"{here}.function"
        if not isinstance(name := function.get("name"), str):
            raise InvalidRequest(f"{inner}.name must be text", field=f"{inner}.name")
        arguments = _text(function, "arguments", inner)
        calls.append(pb.ToolCall(id=_text(call, "id", here), name=name, arguments=arguments))
    return calls


def _text(given: dict[str, Any], name: str, where: str) -> str:
    """Return a member that is text, empty without one. Raises InvalidRequest."""
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be text", field=f"{where}.{name}")
    return value or ""


def _content(content: Any, where: str, role: str) -> str:
    """Return the content of a message as text. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    if content is None and role in SILENT_ROLES:
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be text or a list of text parts", field=where)
    check_length(len(content), MAX_CONTENT_PARTS, field=where)
    texts: list[str] = []
    for position, part in enumerate(content):
        here, kind = field_path(where, position), part.get("type") if isinstance(part, dict) else None
        if role == "tool" and isinstance(kind, str) and kind != "text":
            texts.append(unseen(kind))
            continue
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(f'{here} must be {{"type": "text", "text": …}}; nothing else is supported', field=here)
        texts.append(text)
    return "\n".join(texts)


def unseen(kind: str) -> str:
    """Return what a model reads in place of a part of a tool's result that is not text: the client cannot change it."""
    return f"[{kind[:MAX_KIND_CHARS]}: not shown, the model reads text only]"
