"""Turns the body of `/v1/responses` into the call of the chat that it stands for."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from common.errors import InvalidRequest
from router.http.cache_options import cache_marks
from router.http.calls import Call, chat_call, renamed
from router.http.responses.body import LOGPROBS, MAX_LABEL_CHARS, ResponsesBody, TextOptions
from router.http.responses.items import read_input
from router.http.schema import ChatBody
from router.http.strict import check_members, field_path, parse_body
from router.http.tools import is_foreign

_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_SAME = (
    *("model", "stream", "tool_choice", "parallel_tool_calls", "thinking_budget", "skip_special_tokens", "priority"),
    *(
        "cache_salt",
        "prompt_cache_key",
        "truncate_prompt_tokens",
        "kvrelay",
        "prompt_cache_retention",
        "prompt_cache_options",
    ),
)
"""Fields that chats have, too."""
_FUNCTION = ("name", "description", "parameters")
"""Members of a tool that the model sees."""
_FORMAT = ("type", "name", "description", "schema", "strict")
"""Members of `text.format`."""


def read_response(raw: bytes) -> Call:
    """Return the call of a `/v1/responses` body. Raises InvalidRequest that names the field."""
    return responses_call(parse_body(ResponsesBody, raw))


def responses_call(body: ResponsesBody) -> Call:
    """Return the call. Raises InvalidRequest that names the field."""
    chat, names = _chat(body), dict(_NAMES)
    if chat.response_format is not None:
        names["structured_outputs"] = "text.format"
    try:
        call = chat_call(chat)
    except InvalidRequest as error:
        error.field = renamed(error.field, names)
        raise
    (request,) = call.requests
    del request.cache_marks[:]  # of the messages that its items became
    request.cache_marks.extend(cache_marks(body, body.input, "input", partial(_texts, body)))
    names = {**call.names, **names}
    return replace(call, settings=_settings(body), names=names, left_out=(*body.left_out, *call.left_out))


def _texts(body: ResponsesBody, items: list[Any]) -> list[str]:
    """Return the texts of the messages that the instructions and some items become."""
    return ([body.instructions] if body.instructions else []) + [each["content"] for each in read_input(items)]


def _chat(body: ResponsesBody) -> ChatBody:
    """Return the chat that a body stands for. Raises InvalidRequest."""
    wants_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wants_logprobs:
        raise InvalidRequest(f'top_logprobs needs include: ["{LOGPROBS}"]', field="top_logprobs")
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return ChatBody.model_construct(
        **body.sampling_options(),
        messages=[*instructions, *read_input(body.input)],
        max_tokens=body.max_output_tokens,
        response_format=_response_format(body.text),
        tools=[_tool(tool, field_path("tools", position)) for position, tool in enumerate(body.tools or ())],
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        **{name: getattr(body, name) for name in _SAME},
    )


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    """Return the `response_format` of a chat; None for text. Raises InvalidRequest."""
    given = {"type": "text"} if text is None or text.format is None else text.format
    if given.get("type") not in ("text", "json_object", "json_schema"):
        raise InvalidRequest("text.format.type must be text, json_object or json_schema", field="text.format")
    check_members(given, _FORMAT, "text.format")
    for name in ("name", "description"):
        if len(str(given.get(name) or "")) > MAX_LABEL_CHARS:
            where = f"text.format.{name}"
            raise InvalidRequest(f"{where} is longer than {MAX_LABEL_CHARS} characters", field=where)
    schema = given.get("schema")
    if not isinstance(schema, dict) and (schema is not None or given["type"] == "json_schema"):
        raise InvalidRequest("text.format.schema must be a schema", field="text.format.schema")
    return None if given["type"] == "text" else {"type": given["type"], "schema": schema}


def _tool(given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a tool as chats describe it, with its members in the given order. Raises InvalidRequest."""
    if is_foreign(given):
        return given
    if given.get("type") != "function" or not isinstance(given.get("name"), str):
        raise InvalidRequest(f'{where} must be {{"type": "function", "name": …}}', field=where)
    function = {name: value for name, value in given.items() if name in _FUNCTION and value is not None}
    return {"type": "function", "function": function}


def _settings(body: ResponsesBody) -> dict[str, Any]:
    """Return the settings of a request as its answer repeats them; None for what the model's defaults say."""
    text, reasoning, sampling = body.text, body.reasoning, body.sampling_options()
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "temperature": sampling.get("temperature"),
        "text": {
            "format": (text and text.format) or {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.get("top_p"),
        "user": body.user,
    }
