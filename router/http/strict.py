"""Checks JSON bodies: a member that is not a field is refused, unless it is known to change no answer.

Options that official clients send and that change no answer are ignored. Unsupported options that would change the
answer are refused, unless their value is the default; so are unknown ones, which may be misspelt.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import InvalidRequest

TEXT = {"type": "string"}
TEXT_OR_NULL: dict[str, Any] = {"type": ["string", "null"]}


def object_schema(optional: Mapping[str, Any] = MappingProxyType({}), /, **required: Any) -> dict[str, Any]:
    """Return the JSON schema of an object with these members."""
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema that allows null too."""
    return {"anyOf": [schema, {"type": "null"}]}


def list_schema(items: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a list."""
    return {"type": "array", "items": items}


def const_schema(value: str) -> dict[str, Any]:
    """Return the JSON schema of one text."""
    return {"type": "string", "const": value}


class Strict(BaseModel):
    """A body, or an object in one: members have exact types, and unknown ones are kept for `parse_body` to refuse."""

    model_config = ConfigDict(
        strict=True, frozen=True, allow_inf_nan=False, extra="allow", use_attribute_docstrings=True
    )
    special_tokens: ClassVar[bool | None] = None
    """The one value of `add_special_tokens` that is allowed, where it has a meaning."""
    ignored: ClassVar[frozenset[str] | None] = None
    """Options that are taken and change no answer; None: those of most endpoints."""
    only_as: ClassVar[Mapping[str, tuple[Any, ...]] | None] = None
    """Unsupported options, each with the values that change nothing; None: those of most endpoints."""
    reasons: ClassVar[Mapping[str, str]] = {}
    """Why options are not supported, where it helps."""


class StrictBody(Strict):
    """A body, or a part of one, of an API other than OpenAI's: it has no options but its fields."""

    ignored = frozenset()
    only_as: ClassVar[Mapping[str, tuple[Any, ...]] | None] = MappingProxyType({})


_HARMLESS = frozenset(
    (
        *("user", "safety_identifier", "metadata", "store", "service_tier", "request_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction", "parallel_tool_calls"),
    )
)
_ONLY_AS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
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
    "cache_salt": (),
}
"""Unsupported options of this and other servers, each with the values that change nothing."""

_Body = TypeVar("_Body", bound=Strict)


def parse_body(kind: type[_Body], raw: bytes) -> _Body:
    """Return the checked body. Raises InvalidRequest that names the field."""
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = field_path(*first["loc"])
        raise InvalidRequest(f"{field}: {first['msg']}" if field else first["msg"], field=field) from None
    _check_extra(body, prefix="", special_tokens=body.special_tokens)
    _check_inner(body, "")
    return body


def option_schemas(kind: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Return the known options that are not fields of a body, with the JSON schema of their allowed values."""
    assert issubclass(kind, Strict)
    ignored, only_as = _options(kind)
    options: dict[str, dict[str, Any]] = {name: {"description": "Ignored."} for name in sorted(ignored)}
    options |= {name: {"enum": [*values, None]} for name, values in only_as.items()}
    if kind.special_tokens is not None:
        options["add_special_tokens"] = {"enum": [kind.special_tokens, None]}
    return options


def _options(kind: type[Strict]) -> tuple[frozenset[str], Mapping[str, tuple[Any, ...]]]:
    """Return the options of a body that are ignored, and those that are taken with some values only."""
    ignored = _HARMLESS if kind.ignored is None else kind.ignored
    return ignored, _ONLY_AS if kind.only_as is None else kind.only_as


def field_path(*parts: str | int) -> str:
    """Return the path of a value in a body as errors name it: `messages[0].content`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _check_inner(part: Strict, path: str) -> None:
    """Check the parts of a body that are bodies themselves."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        inner = [value] if isinstance(value, Strict) else value
        if not isinstance(inner, list) or not inner or not isinstance(inner[0], Strict):
            continue
        for position, each in enumerate(inner):
            here = field_path(*filter(None, (path, type(part).model_fields[name].alias or name)))
            here += f"[{position}]" if inner is value else ""
            _check_extra(each, prefix=f"{here}.", special_tokens=None)
            _check_inner(each, here)


def _check_extra(body: Strict, *, prefix: str, special_tokens: bool | None) -> None:
    ignored, only_as = _options(type(body))
    for name, value in (body.model_extra or {}).items():
        field = prefix + name[:80]
        if value is None or (not prefix and name in ignored):
            continue
        if name == "add_special_tokens" and special_tokens is not None:
            allowed: tuple[Any, ...] | None = (special_tokens,)
        else:
            allowed = None if prefix else only_as.get(name)
        if allowed is None:
            raise InvalidRequest(f"{field} is unknown here", field=field)
        # In Python True == 1.
        if not any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in allowed):
            takes = "; only " + " or ".join(map(json.dumps, allowed)) if allowed else ""
            reason = f": {body.reasons[name]}" if name in body.reasons else ""
            raise InvalidRequest(f"{field} is not supported{takes}{reason}", field=field)
