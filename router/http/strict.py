"""Checks JSON bodies: what happens to members that are not fields.

Options that official clients send and that change no answer are ignored. Unsupported options that would change the
answer are refused, unless their value is the default. Unknown members are left out, and told to the client in a header;
but one that looks like a misspelt field is refused, and so is each of an object that is closed.
"""

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

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


def _describe_closed(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Say in the schema of an object which further members it may have."""
    assert issubclass(kind, Strict)
    if kind.is_closed:
        schema["additionalProperties"] = {"type": "null"}  # as if it were left out


class Strict(BaseModel):
    """A body, or an object in one: members have exact types, and unknown ones are kept for `parse_body` to check."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        extra="allow",
        use_attribute_docstrings=True,
        json_schema_extra=_describe_closed,
    )
    special_tokens: ClassVar[bool | None] = None
    """The one value of `add_special_tokens` that is allowed, where it has a meaning."""
    ignored: ClassVar[frozenset[str] | None] = None
    """Options that are taken and change no answer; None: those of most endpoints."""
    only_as: ClassVar[Mapping[str, tuple[Any, ...]] | None] = None
    """Unsupported options, each with the values that change nothing; None: those of most endpoints."""
    reasons: ClassVar[Mapping[str, str]] = {}
    """Why options are not supported, where it helps."""
    is_closed: ClassVar[bool] = False
    """Whether unknown members are refused: it is this server's own, or says what the answer has to be."""
    _left_out: tuple[str, ...] = PrivateAttr(())

    @property
    def left_out(self) -> tuple[str, ...]:
        """Unknown members of a body and of the objects in it, each by its path, once it is checked."""
        return self._left_out

    def check(self) -> None:
        """Note the unknown members of a body. Raises InvalidRequest for one that is not taken."""
        own = _unknown(self, prefix="", special_tokens=self.special_tokens)
        self._left_out = (*own, *_unknown_inside(self, ""))


class StrictBody(Strict):
    """A body, or a part of one, of an API other than OpenAI's: it has no options but its fields."""

    ignored = frozenset()
    only_as: ClassVar[Mapping[str, tuple[Any, ...]] | None] = MappingProxyType({})


_HARMLESS = frozenset(
    (
        *("user", "safety_identifier", "metadata", "store", "service_tier", "request_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction", "parallel_tool_calls"),
        "verbosity",
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
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
}
"""Unsupported options of this and other servers, each with the values that change nothing."""

_MAX_NAME_CHARS = 80
_MAX_UNKNOWN = 32
"""Unknown members of an object that are looked at."""
_ALIKE = 0.9
"""Least likeness of two names, by the share of characters in common, at which one is the other misspelt."""

_Body = TypeVar("_Body", bound=Strict)


def parse_body(kind: type[_Body], raw: bytes) -> _Body:
    """Return the checked body. Raises InvalidRequest that names the field."""
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = field_path(*(each if isinstance(each, int) else each[:_MAX_NAME_CHARS] for each in first["loc"]))
        raise InvalidRequest(f"{field}: {first['msg']}" if field else first["msg"], field=field) from None
    body.check()
    return body


def check_members(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise InvalidRequest for a member of an object that is not known and not null."""
    for name, value in given.items():
        if name not in known and value is not None:
            field = f"{where}.{name[:_MAX_NAME_CHARS]}"
            raise InvalidRequest(f"{field} is unknown here", field=field)


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


def _unknown_inside(part: Strict, path: str) -> Iterator[str]:
    """Yield the unknown members of the objects in a body or in a part of it. Raises InvalidRequest."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        inner = [value] if isinstance(value, Strict) else value
        if not isinstance(inner, list) or not inner or not isinstance(inner[0], Strict):
            continue
        for position, each in enumerate(inner):
            here = field_path(*filter(None, (path, type(part).model_fields[name].alias or name)))
            here += f"[{position}]" if inner is value else ""
            yield from _unknown(each, prefix=f"{here}.", special_tokens=None)
            yield from _unknown_inside(each, here)


def _unknown(body: Strict, *, prefix: str, special_tokens: bool | None) -> Iterator[str]:
    """Yield the members of one object that nothing is known of. Raises InvalidRequest for one that is not taken."""
    ignored, only_as = (frozenset[str](), {}) if prefix else _options(type(body))
    if special_tokens is not None:
        only_as = {**only_as, "add_special_tokens": (special_tokens,)}
    given = [(name, value) for name, value in (body.model_extra or {}).items() if value is not None]
    if len(given) > _MAX_UNKNOWN:
        field = prefix + given[0][0][:_MAX_NAME_CHARS]
        raise InvalidRequest(f"{field} and {len(given) - 1} further members are unknown here", field=field)
    known = {*type(body).model_fields, *ignored, *only_as}
    for name, value in given:
        shown = name[:_MAX_NAME_CHARS]  # longer ones would also take long to compare
        field = prefix + shown
        if name in ignored:
            continue
        if name in only_as:
            _check_value(body, field, value, only_as[name])
            continue
        meant = difflib.get_close_matches(shown, known, n=1, cutoff=_ALIKE)
        if meant or body.is_closed:
            raise InvalidRequest(
                f"{field} is unknown here" + "".join(f"; {each} is known" for each in meant), field=field
            )
        yield field


def _check_value(body: Strict, field: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise InvalidRequest unless the value of an option is one of those that ask for nothing."""
    # In Python True == 1.
    if any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in allowed):
        return
    takes = "; only " + " or ".join(map(json.dumps, allowed)) if allowed else ""
    reason = f": {body.reasons[field]}" if field in body.reasons else ""
    raise InvalidRequest(f"{field} is not supported{takes}{reason}", field=field)
