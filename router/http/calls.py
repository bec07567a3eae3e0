"""Turns a checked body into requests for the front door and the form of their answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from common.sampling import MAX_LOGPROBS, Biases, Parameter, Tokens
from common.wire import MAX_CHAT_MESSAGES, MAX_CONTENT_PARTS, MAX_PROMPT_TOKENS, MAX_PROMPTS, check_length
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2
from router.http.schema import ROLES, SAMPLING_FIELDS, ChatBody, CompletionBody, GenerationBody, field_path

DEFAULT_COMPLETION_TOKENS = 16
"""Default of OpenAI's API; a chat takes the server's."""
_UINT32, _UINT64, _INT64, _INT32 = 1 << 32, 1 << 64, 1 << 63, 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call: requests, and the form of their answers."""

    requests: tuple[pb.GenerateRequest, ...]
    num_samples: int
    """Samples of each request."""
    is_streamed: bool
    wants_usage: bool
    """Whether a stream ends with the token counts."""
    wants_running_usage: bool
    """Whether every event of a stream has them."""
    wants_logprobs: bool
    wants_token_ids: bool
    wants_echo: bool
    wants_report: bool
    timeout_s: float | None


def completion_call(body: CompletionBody) -> Call:
    """Return the call. Raises InvalidRequest that names the field."""
    sampling = _sampling(body, {"max_tokens": DEFAULT_COMPLETION_TOKENS} | body.sampling_options())
    if body.logprobs is not None:
        sampling.logprobs = _uint(body.logprobs, "logprobs")
        if body.echo:
            sampling.prompt_logprobs = sampling.logprobs
    prompts = _prompts(body.prompt)
    return _call(
        body,
        tuple(_request(body, sampling, **prompt) for prompt in prompts),
        wants_logprobs=body.logprobs is not None,
        wants_echo=bool(body.echo),
    )


def chat_call(body: ChatBody) -> Call:
    """Return the call. Raises InvalidRequest that names the field."""
    options = body.sampling_options()
    limit = body.max_completion_tokens
    if limit is not None and options.setdefault("max_tokens", limit) != limit:
        raise InvalidRequest("max_tokens and max_completion_tokens differ", field="max_completion_tokens")
    sampling = _sampling(body, options)
    if body.logprobs:
        sampling.logprobs = _uint(body.top_logprobs or 0, "top_logprobs", at_most=MAX_LOGPROBS)
    elif body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    chat = pb.ChatPrompt(messages=read_messages(body.messages))
    return _call(body, (_request(body, sampling, chat=chat),), wants_logprobs=bool(body.logprobs), wants_echo=False)


def body_field(field: str, *, prompt_field: str) -> str:
    """Return the name in the body of a field of the request that was made from it."""
    if field in ("text", "token_ids", "prompt", "chat"):
        return prompt_field
    for ours, theirs in (("sampling.", ""), ("chat.", ""), ("objective.", "kvrelay."), ("token_ids[", "prompt[")):
        if field.startswith(ours):
            return theirs + field.removeprefix(ours)
    return field


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
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if message.get(name):
            raise InvalidRequest(f"{where}.{name} is not supported", field=f"{where}.{name}")
    return pb.ChatMessage(role=ROLES[role], content=_content(message.get("content"), f"{where}.content"))


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be text or a list of text parts", field=where)
    check_length(len(content), MAX_CONTENT_PARTS, field=where)
    texts: list[str] = []
    for position, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            here = field_path(where, position)
            raise InvalidRequest(f'{here} must be {{"type": "text", "text": …}}; nothing else is supported', field=here)
        texts.append(text)
    return "\n".join(texts)


def _prompts(prompt: Any) -> list[dict[str, Any]]:
    """Return the prompt of each request: a text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [{"text": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest("prompt must be text, a list of texts, or token ids, and not empty", field="prompt")
    if isinstance(prompt[0], int):
        return [{"token_ids": pb.TokenIds(ids=read_token_ids(prompt, "prompt"))}]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"{len(prompt)} prompts; at most {MAX_PROMPTS}", field="prompt")
    if isinstance(prompt[0], str):
        for position, text in enumerate(prompt):
            if not isinstance(text, str):
                raise InvalidRequest(f"prompt[{position}] must be text like the first", field=f"prompt[{position}]")
        return [{"text": text} for text in prompt]
    lists = [read_token_ids(ids, f"prompt[{position}]") for position, ids in enumerate(prompt)]
    return [{"token_ids": pb.TokenIds(ids=ids)} for ids in lists]


def read_token_ids(ids: Any, where: str) -> list[int]:
    """Return a list of numbers that fit the wire. Raises InvalidRequest that names the first that does not."""
    if not isinstance(ids, list):
        raise InvalidRequest(f"{where} must be a list of token ids", field=where)
    check_length(len(ids), MAX_PROMPT_TOKENS, field=where)
    # Whole lists first: a look at each of a long prompt's ids would take milliseconds.
    if set(map(type, ids)) - {int} or (ids and not 0 <= min(ids) <= max(ids) < _UINT32):
        for position, token_id in enumerate(ids):
            _uint(token_id, field_path(where, position))
    return ids


def _request(body: GenerationBody, sampling: sampling_pb2.SamplingParams, **prompt: Any) -> pb.GenerateRequest:
    priority = body.priority or 0
    if not -_INT32 <= priority < _INT32:
        raise InvalidRequest(f"priority is {priority}; allowed are 32 bits", field="priority")
    request = pb.GenerateRequest(model=body.model or "", sampling=sampling, priority=priority, **prompt)
    if body.kvrelay is not None:
        if body.kvrelay.ttft_s is not None:
            request.objective.ttft_s = body.kvrelay.ttft_s
        if body.kvrelay.itl_s is not None:
            request.objective.itl_s = body.kvrelay.itl_s
    return request


def _call(
    body: GenerationBody, requests: tuple[pb.GenerateRequest, ...], *, wants_logprobs: bool, wants_echo: bool
) -> Call:
    options, extension = body.stream_options, body.kvrelay
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", field="stream_options")
    timeout_s = extension.timeout_s if extension is not None else None
    if timeout_s is not None and timeout_s <= 0:
        raise InvalidRequest(f"{timeout_s} is not a positive number of seconds", field="kvrelay.timeout_s")
    return Call(
        requests=requests,
        num_samples=requests[0].sampling.n or 1,
        is_streamed=bool(body.stream),
        wants_usage=options is not None and bool(options.include_usage),
        wants_running_usage=options is not None and bool(options.continuous_usage_stats),
        wants_logprobs=wants_logprobs,
        wants_token_ids=bool(body.return_token_ids),
        wants_echo=wants_echo,
        wants_report=extension is not None and bool(extension.report),
        timeout_s=timeout_s,
    )


def _sampling(body: GenerationBody, options: Mapping[str, Any]) -> sampling_pb2.SamplingParams:
    """Return the message; options that are left out stay unset. Ranges narrower than the wire's are checked later."""
    values = {name: _on_the_wire(SAMPLING_FIELDS[name], value) for name, value in options.items()}
    return sampling_pb2.SamplingParams(include_special_tokens=body.skip_special_tokens is False, **values)


def _on_the_wire(parameter: Parameter, value: Any) -> Any:
    """Return the value of an option as its field holds it. Raises InvalidRequest."""
    name = parameter.option
    if name == "seed":
        if not -_INT64 <= value < _UINT64:
            raise InvalidRequest(f"seed is {str(value)[:40]}; allowed are 64 bits", field="seed")
        return value % _UINT64
    if name == "top_k" and value == -1:  # all, like 0
        return 0
    if parameter.type is int:
        return _uint(value, name)
    if parameter.type == Tokens:
        return [_uint(token_id, field_path(name, position)) for position, token_id in enumerate(value)]
    return _biases(value, name) if parameter.type == Biases else value


def _biases(biases: Mapping[str, float], field: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for name, bias in biases.items():
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            raise InvalidRequest(f"{field}: {name[:40]!r} is not a token id", field=field)
        found[_uint(int(name), field)] = bias
    return found


def _uint(value: Any, field: str, *, at_most: int = _UINT32 - 1) -> int:
    """Return a number that fits the wire. Raises InvalidRequest."""
    if type(value) is not int:  # a bool is an int to isinstance
        raise InvalidRequest(f"{field} must be a whole number", field=field)
    if not 0 <= value <= at_most:
        raise InvalidRequest(f"{field} is {str(value)[:40]}; allowed are 0 to {at_most}", field=field)
    return value
