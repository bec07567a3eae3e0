"""Reads the conversation of a chat's body: messages, tools, and what has to be called."""

import json
from collections.abc import Mapping
from typing import Any

from common.errors import InvalidRequest
from common.wire import MAX_TOOLS, check_length
from kvrelay.v1 import inference_pb2 as pb
from router.http.contents import entries_in, joined_texts, role_in, text_in
from router.http.schema import MESSAGE_TEXTS, ROLES, SILENT_ROLES, ChatBody
from router.http.strict import field_path
from router.http.tools import read_choice

_MAX_BUDGET = (1 << 32) - 1


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
    return [_message(message, where) for where, message in entries_in(messages, "messages")]


def _message(message: Mapping[str, Any], where: str) -> pb.ChatMessage:
    role = role_in(message, where, ROLES)
    for name in ("function_call", "audio"):
        if message.get(name):
            raise InvalidRequest(f"{where}.{name} is not supported", field=f"{where}.{name}")
    if message.get("tool_calls") and role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls: only an assistant calls tools", field=f"{where}.tool_calls")
    calls = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    texts = {name: text_in(message, name, where, default="") for name in MESSAGE_TEXTS}
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
        name, arguments = text_in(function, "name", inner), text_in(function, "arguments", inner, default="")
        calls.append(pb.ToolCall(id=text_in(call, "id", here, default=""), name=name, arguments=arguments))
    return calls


def _content(content: Any, where: str, role: str) -> str:
    """Return the content of a message as text. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    if content is None and role in SILENT_ROLES:
        return ""
    return joined_texts(content, where, ("text",), is_result=role == "tool")
