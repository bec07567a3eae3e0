"""Turns a checked body into requests for the front door and the form of their answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from common.errors import InvalidRequest
from common.parameter import Biases, Json, Parameter, Tokens
from common.sampling import MAX_LOGPROBS, MAX_N
from common.structured_outputs import structure_text
from common.wire import MAX_PROMPT_TOKENS, MAX_PROMPTS, check_length
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2
from router.http.cache_options import cache_marks
from router.http.messages import read_chat_prompt, read_messages
from router.http.response_format import only_tokens, read_format
from router.http.schema import SAMPLING_FIELDS, ChatBody, CompletionBody, EmbeddingBody, Extension, GenerationBody
from router.http.strict import field_path
from router.http.tools import foreign_tools
from router.record.sessions import MAX_SESSION_CHARS

_GUIDED = ("json", "regex", "choice", "grammar")
DEFAULT_COMPLETION_TOKENS = 16
"""Default of OpenAI's API; a chat takes the server's."""
_LEAST_TOP_P = 1e-9
"""Stands for 0, with which OpenAI's API takes the most probable token alone."""
_UINT32, _UINT64, _INT64, _INT32 = 1 << 32, 1 << 64, 1 << 63, 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call: requests, and the form of their answers."""

    requests: tuple[pb.GenerateRequest, ...]
    num_samples: int
    """Samples of each request."""
    num_best: int
    """Samples of each request that the answer has: the most probable ones."""
    is_streamed: bool
    wants_usage: bool
    """Whether a stream ends with the token counts."""
    wants_running_usage: bool
    """Whether every event of a stream has them."""
    wants_logprobs: bool
    wants_token_ids: bool
    wants_prompt_logprobs: bool
    wants_echo: bool
    wants_only_echo: bool = False
    """Whether the answer is the prompt alone: the one token that is generated is left out."""
    wants_report: bool
    timeout_s: float | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the call as the answer repeats them, where it does."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The body's names of fields that chats call otherwise."""
    left_out: tuple[str, ...] = ()
    """Parts of the body without an effect, which the client is told."""


def completion_call(body: CompletionBody) -> Call:
    """Return the call. Raises InvalidRequest that names the field."""
    options = {"max_tokens": DEFAULT_COMPLETION_TOKENS} | body.sampling_options()
    wants_only_echo = bool(body.echo) and options["max_tokens"] == 0
    if wants_only_echo and body.stream:
        raise InvalidRequest("max_tokens: 0 has nothing to stream", field="max_tokens")
    structure = _structure(body)
    sampling = _sampling(options | {"max_tokens": 1} if wants_only_echo else options, structure, body)
    if body.logprobs is not None:
        sampling.logprobs = _uint(body.logprobs, "logprobs")
        if body.echo:
            sampling.prompt_logprobs = max(sampling.logprobs, sampling.prompt_logprobs)
    num_best = sampling.n or 1
    if body.best_of is not None:
        _ask_for_best_of(body, sampling, num_best)
    prompts = read_prompts(body.prompt, "prompt")
    call = _call(
        body,
        tuple(_request(body, sampling, **prompt) for prompt in prompts),
        wants_logprobs=body.logprobs is not None,
        wants_echo=bool(body.echo),
    )
    return replace(call, num_best=num_best, wants_only_echo=wants_only_echo, names=_names_of(structure))


def _ask_for_best_of(body: CompletionBody, sampling: sampling_pb2.SamplingParams, num_best: int) -> None:
    """Ask for `best_of` samples and their log-probabilities; `num_best` are answered. Raises InvalidRequest."""
    best_of = _uint(body.best_of, "best_of", at_most=MAX_N)
    if best_of < num_best:
        raise InvalidRequest(f"best_of is {best_of}, less than n, which is {num_best}", field="best_of")
    if best_of > num_best:
        if body.stream:
            raise InvalidRequest("the best samples are known at the end: best_of is not streamed", field="best_of")
        sampling.n = best_of
        sampling.logprobs = sampling.logprobs  # sets the field: without it, 0


def chat_call(body: ChatBody) -> Call:
    """Return the call. Raises InvalidRequest that names the field."""
    options = body.sampling_options()
    limit = body.max_completion_tokens
    if limit is not None and options.setdefault("max_tokens", limit) != limit:
        raise InvalidRequest("max_tokens and max_completion_tokens differ", field="max_completion_tokens")
    structure = _structure(body)
    sampling = _sampling(options, structure, body)
    if body.logprobs:
        sampling.logprobs = _uint(body.top_logprobs or 0, "top_logprobs", at_most=MAX_LOGPROBS)
    elif body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    chat = read_chat_prompt(body)
    call = _call(body, (_request(body, sampling, chat=chat),), wants_logprobs=bool(body.logprobs), wants_echo=False)
    is_forced = chat.tool_choice.kind in (pb.TOOL_CHOICE_KIND_REQUIRED, pb.TOOL_CHOICE_KIND_NAMED)
    names = {"structured_outputs": "tools"} if is_forced else _names_of(structure)
    return replace(call, names=names, left_out=(*call.left_out, *foreign_tools(body.tools or ())))


class NameField(Protocol):
    """Returns the name in a body of a field of the request that was made from it."""

    def __call__(self, field: str, *, prompt_field: str) -> str:
        """`prompt_field` is the body's name for the prompt."""
        ...


def body_field(field: str, *, prompt_field: str) -> str:
    """Return the name in the body of a field of the request that was made from it."""
    if field in ("text", "token_ids", "prompt", "chat"):
        return prompt_field
    if field == "chat.template_variables":
        return "chat_template_kwargs"
    for ours, theirs in (
        ("sampling.", ""),
        ("chat.", ""),
        ("objective.", "kvrelay."),
        ("token_ids[", f"{prompt_field}["),
    ):
        if field.startswith(ours):
            return theirs + field.removeprefix(ours)
    return field


def renamed(path: str, names: Mapping[str, str]) -> str:
    """Return a field under the body's own name, where it has one; places inside such a field are left out."""
    head = re.split(r"[.[]", path, maxsplit=1)[0]
    return names.get(head, path)


def read_prompts(prompt: Any, where: str) -> list[dict[str, Any]]:
    """Return the prompt of each request: a text, texts, token ids, or lists of token ids. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return [{"text": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"{where} must be text, a list of texts, or token ids, and not empty", field=where)
    if isinstance(prompt[0], int):
        return [{"token_ids": pb.TokenIds(ids=read_token_ids(prompt, where))}]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"{len(prompt)} prompts; at most {MAX_PROMPTS}", field=where)
    if isinstance(prompt[0], str):
        for position, text in enumerate(prompt):
            if not isinstance(text, str):
                here = field_path(where, position)
                raise InvalidRequest(f"{here} must be text like the first", field=here)
        return [{"text": text} for text in prompt]
    lists = [read_token_ids(ids, field_path(where, position)) for position, ids in enumerate(prompt)]
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
    request = pb.GenerateRequest(model=body.model or "", sampling=sampling, **prompt)
    request.session_id = (body.prompt_cache_key or "")[:MAX_SESSION_CHARS]
    set_terms(request, body)
    given = body.messages if isinstance(body, ChatBody) else None
    request.cache_marks.extend(
        cache_marks(body, given, "messages", lambda messages: [each.content for each in read_messages(messages)])
    )
    return request


def set_terms(request: pb.GenerateRequest | pb.EmbedRequest, body: GenerationBody | EmbeddingBody) -> None:
    """Set what generations and embeddings have in common. Raises InvalidRequest."""
    priority, extension = body.priority or 0, body.kvrelay
    if not -_INT32 <= priority < _INT32:
        raise InvalidRequest(f"priority is {priority}; allowed are 32 bits", field="priority")
    request.priority = priority
    request.cache_salt = body.cache_salt or ""
    if body.truncate_prompt_tokens is not None:
        request.truncate_prompt_tokens = _uint(body.truncate_prompt_tokens, "truncate_prompt_tokens")
    if extension is not None:
        if extension.ttft_s is not None:
            request.objective.ttft_s = extension.ttft_s
        if extension.tpot_s is not None:
            request.objective.tpot_s = extension.tpot_s


def read_timeout(extension: Extension | None) -> float | None:
    """Return the deadline of a call in seconds; None without one. Raises InvalidRequest."""
    timeout_s = extension.timeout_s if extension is not None else None
    if timeout_s is not None and timeout_s <= 0:
        raise InvalidRequest(f"{timeout_s} is not a positive number of seconds", field="kvrelay.timeout_s")
    return timeout_s


def _call(
    body: GenerationBody, requests: tuple[pb.GenerateRequest, ...], *, wants_logprobs: bool, wants_echo: bool
) -> Call:
    options, extension = body.stream_options, body.kvrelay
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs are not streamed", field="prompt_logprobs")
    return Call(
        requests=requests,
        num_samples=requests[0].sampling.n or 1,
        num_best=requests[0].sampling.n or 1,
        is_streamed=bool(body.stream),
        wants_usage=options is not None and bool(options.include_usage),
        wants_running_usage=options is not None and bool(options.continuous_usage_stats),
        wants_logprobs=wants_logprobs,
        wants_token_ids=bool(body.return_token_ids),
        wants_prompt_logprobs=body.prompt_logprobs is not None,
        wants_echo=wants_echo,
        wants_report=extension is not None and bool(extension.report),
        timeout_s=read_timeout(extension),
        left_out=body.left_out,
    )


@dataclass(frozen=True, slots=True)
class _Structure:
    """What the answer has to look like, and the field of the body that says so."""

    field: str
    value: dict[str, Any]


def _names_of(structure: _Structure | None) -> Mapping[str, str]:
    return {} if structure is None else {"structured_outputs": structure.field}


def _sampling(
    options: Mapping[str, Any], structure: _Structure | None, body: GenerationBody
) -> sampling_pb2.SamplingParams:
    """Return the message; options that are left out stay unset. Ranges narrower than the wire's are checked later."""
    values = {name: _on_the_wire(SAMPLING_FIELDS[name], value) for name, value in options.items()}
    if structure is not None:
        values["structured_outputs"] = structure_text(structure.value)
    if body.prompt_logprobs is not None:
        values["prompt_logprobs"] = _uint(body.prompt_logprobs, "prompt_logprobs", at_most=MAX_LOGPROBS)
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
    if name == "top_p" and value == 0:
        return _LEAST_TOP_P
    if parameter.type is int:
        return _uint(value, name)
    if parameter.type == Tokens:
        return [_uint(token_id, field_path(name, position)) for position, token_id in enumerate(value)]
    if parameter.type == Json:
        return structure_text(value)
    return _biases(value, name) if parameter.type == Biases else value


def _structure(body: GenerationBody) -> _Structure | None:
    """Return what the answer has to look like by the one field that says so. Raises InvalidRequest for several."""
    given: dict[str, Any] = {
        "structured_outputs": body.sampling_options().get("structured_outputs"),
        "response_format": None if body.response_format is None else read_format(body.response_format),
    }
    for kind in _GUIDED:
        value = getattr(body, f"guided_{kind}")
        given[f"guided_{kind}"] = None if value is None else {kind: value}
    if (token_ids := body.allowed_token_ids) is not None:
        given["allowed_token_ids"] = only_tokens(read_token_ids(token_ids, "allowed_token_ids"))
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise InvalidRequest(f"only one of {', '.join(sorted(given))} is taken", field=sorted(given)[0])
    return next((_Structure(name, value) for name, value in given.items()), None)


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
