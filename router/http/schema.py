"""The JSON bodies of the endpoints: types are checked here, values where all doors check them (validation.py).

What official clients send and what changes no answer is ignored. What would change the answer and is not supported is
refused unless it says what we do anyway; so is what nobody knows, which may be a misspelt option.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from common.bounds import MAX_PROMPT_TOKENS
from common.errors import InvalidRequest
from common.sampling import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKENS


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_Stops = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)]
_StopTokens = Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)]
_Biases = Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)]
_Tokens = Annotated[list[int], Field(max_length=MAX_PROMPT_TOKENS)]
ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Of a message, with what each is to the model."""
# Of fields that calls.py reads by hand: for the OpenAPI document.
_TEXT = {"type": "string"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"type": "string", "enum": list(ROLES)},
            "content": {
                "anyOf": [
                    _TEXT,
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"type": "string", "const": "text"}, "text": _TEXT},
                        },
                    },
                ]
            },
        },
    },
}


Prompt = Annotated[Any, WithJsonSchema(_PROMPT)]
Messages = Annotated[Any, WithJsonSchema(_MESSAGES)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, allow_inf_nan=False, extra="allow", use_attribute_docstrings=True
    )
    special_tokens: ClassVar[bool | None] = None
    """What `add_special_tokens` may say, where it has a meaning."""


class StreamOptions(_Strict):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Extension(_Strict):
    """`kvrelay`: what OpenAI's API has no words for."""

    report: bool | None = None
    """Tell plan, timings and transfer with the answer."""
    timeout_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None


class GenerationBody(_Strict):
    """What both generating endpoints take."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Annotated[_Stops | None, BeforeValidator(_as_list, json_schema_input_type=str | _Stops | None)] = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: _Biases | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Widespread extensions.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: _StopTokens | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    kvrelay: Extension | None = None


class CompletionBody(GenerationBody):
    """`/v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})
    special_tokens = True
    prompt: Prompt = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(GenerationBody):
    """`/v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra={"required": ["messages"]})
    special_tokens = False
    messages: Messages = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(_Strict):
    """`/tokenize`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Strict):
    """`/detokenize`."""

    model: str | None = None
    tokens: _Tokens


_HARMLESS = frozenset(
    (
        *("user", "safety_identifier", "metadata", "store", "service_tier", "request_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction", "parallel_tool_calls"),
    )
)
_ONLY_AS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "structured_outputs": (),
    "cache_salt": (),
}
"""Known options of this and other servers that are not supported, and the values that change nothing."""

_Body = TypeVar("_Body", bound=_Strict)


def parse_body(kind: type[_Body], raw: bytes) -> _Body:
    """Return the checked body. Raises InvalidRequest that names the field."""
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = field_path(*first["loc"])
        raise InvalidRequest(f"{field}: {first['msg']}" if field else first["msg"], field=field) from None
    _check_extra(body, prefix="", special_tokens=body.special_tokens)
    for name in ("stream_options", "kvrelay"):
        inner = getattr(body, name, None)
        if inner is not None:
            _check_extra(inner, prefix=f"{name}.", special_tokens=None)
    return body


def option_schemas(kind: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Return the known options that are no fields of a body, with the JSON schema of the values that they may have."""
    options: dict[str, dict[str, Any]] = {name: {"description": "Ignored."} for name in sorted(_HARMLESS)}
    options |= {name: {"enum": [*values, None]} for name, values in _ONLY_AS.items()}
    special_tokens = getattr(kind, "special_tokens", None)
    if special_tokens is not None:
        options["add_special_tokens"] = {"enum": [special_tokens, None]}
    return options


def field_path(*parts: str | int) -> str:
    """Return how an error names a place: `messages[0].content`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _check_extra(body: _Strict, *, prefix: str, special_tokens: bool | None) -> None:
    for name, value in (body.model_extra or {}).items():
        field = prefix + name[:80]
        if value is None or (not prefix and name in _HARMLESS):
            continue
        if name == "add_special_tokens" and special_tokens is not None:
            allowed: tuple[Any, ...] | None = (special_tokens,)
        else:
            allowed = None if prefix else _ONLY_AS.get(name)
        if allowed is None:
            raise InvalidRequest(f"{field} is unknown here", field=field)
        # True equals 1 to Python.
        if not any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in allowed):
            takes = "; only " + " or ".join(map(json.dumps, allowed)) if allowed else ""
            raise InvalidRequest(f"{field} is not supported{takes}", field=field)
