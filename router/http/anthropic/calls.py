"""Turns a checked body into the call of a chat with the same meaning."""

from dataclasses import replace
from typing import Any

from common.errors import InvalidRequest
from router.http.anthropic.cache_control import read_marks
from router.http.anthropic.schema import CountTokensBody, MessagesBody, Thinking, Tool, ToolChoice
from router.http.anthropic.turns import read_turns
from router.http.calls import Call, chat_call
from router.http.schema import ChatBody
from router.http.strict import field_path, parse_body

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NAMES = {
    "chat.thinking_budget": "thinking",
    "chat.template_variables": "thinking",
    "chat.tool_choice": "tool_choice",
}
"""The body's names for fields of a request that have another name there."""
_BEGINNINGS = {
    "sampling.stop": "stop_sequences",
    "sampling.": "",
    "chat.": "",
    "objective.": "kvrelay.",
}
"""The body's beginnings for names that differ in their beginning alone; the first that fits counts."""


def read_messages_body(raw: bytes) -> Call:
    """Return the call of a `/v1/messages` body. Raises InvalidRequest that names the field."""
    body = parse_body(MessagesBody, raw)
    call = chat_call(_chat_of(body))
    marks = read_marks(body)
    for request in call.requests:
        request.cache_marks.extend(marks)
        request.chat.soft_thinking_budget = request.chat.HasField("thinking_budget")  # a target in Anthropic's API
    names = call.names if _response_format(body) is None else {"structured_outputs": "output_config.format"}
    left_out = (*body.left_out, *call.left_out)
    return replace(call, names=names, left_out=left_out, wants_only_echo=not body.max_tokens)


def body_field(field: str, *, prompt_field: str) -> str:
    """Return the name in the body of a field of the request that was made from it."""
    if field in _NAMES:
        return _NAMES[field]
    if field in ("chat", "prompt") or field.startswith("chat.messages"):  # places differ: see turns.py
        return prompt_field
    ours = next((each for each in _BEGINNINGS if field.startswith(each)), "")
    name = _BEGINNINGS.get(ours, "") + field.removeprefix(ours)
    return name.replace(".function.parameters", ".input_schema").replace(".function", "")


def _chat_of(body: MessagesBody) -> ChatBody:
    """Return the chat that asks for the same."""
    return conversation_of(body).model_copy(
        update={
            "max_tokens": body.max_tokens or 1,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences or None,
            "seed": body.seed,
            "stream": body.stream,
            "response_format": _response_format(body),
            "kvrelay": body.kvrelay,
            "prompt_cache_key": _session_name(body.metadata),
        }
    )


def _session_name(metadata: Any) -> str | None:
    """Return the session that a body names; None without one. Anything may be there."""
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    return user_id if isinstance(user_id, str) else None


def conversation_of(body: CountTokensBody) -> ChatBody:
    """Return a chat of the conversation. Raises InvalidRequest that names the field."""
    choice, messages = body.tool_choice, read_turns(body.system, body.messages)
    thinking: dict[str, Any] = {} if body.thinking is None else _thinking(body.thinking)
    last = messages[-1]
    return ChatBody.model_construct(
        model=body.model,
        messages=messages,
        continue_final_message=last["role"] == "assistant" and not last.get("tool_calls"),
        tools=[_tool(tool, field_path("tools", position)) for position, tool in enumerate(body.tools or ())],
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        **thinking,
    )


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    """Return a tool as chats describe it. Raises InvalidRequest."""
    if tool.type not in (None, "custom"):
        return {"type": tool.type}
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise InvalidRequest(f"{where}.{name} must be set", field=f"{where}.{name}")
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name goes with the type tool", field="tool_choice.name")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _thinking(thinking: Thinking) -> dict[str, Any]:
    """Return the options of a chat; `adaptive` leaves everything to the model."""
    if thinking.type == "adaptive":
        return {}
    if thinking.type == "disabled":
        return {"chat_template_kwargs": {"enable_thinking": False}}
    return {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": thinking.budget_tokens}


def _response_format(body: MessagesBody) -> dict[str, Any] | None:
    """Return what the answer has to look like."""
    given = None if body.output_config is None else body.output_config.format
    if given is not None and body.output_format is not None:
        raise InvalidRequest("output_config.format and output_format say the same: send one", field="output_format")
    given = given or body.output_format
    return None if given is None else {"type": "json_schema", "json_schema": {"schema": given.json_schema}}
