"""Structures that answers follow: values of the sampling parameter `structured_outputs`.

A JSON object with one key, named as in vLLM's API: {"json": SCHEMA}, {"json_object": true}, {"regex": "…"},
{"choice": ["…", …]}, {"grammar": "…"} (Lark), or {"structural_tag": {"structures": [{"begin": "…", "schema": SCHEMA,
"end": "…"}, …], "triggers": ["…", …]}}: free text, in which what follows a trigger is one of the structures. Workers
compile it to a grammar (engine/text/grammar.py); here it is only read: a router refuses what no worker could compile.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from common.errors import InvalidRequest

FIELD = "sampling.structured_outputs"
MAX_DEPTH = 64
"""Most levels of a schema."""
MAX_CHOICES = 1024
MAX_TAGS = 128
"""Most structures, and most triggers, of a structural tag."""

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
_NAMES = {dict: "an object", bool: "true", str: "a string", list: "a list"}
_KINDS: Mapping[str, Any] = {
    "json": dict,
    "json_object": bool,
    "regex": str,
    "choice": list,
    "grammar": str,
    "structural_tag": dict,
}


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure as it was asked for."""

    kind: Kind
    value: Any


def read_structure(text: str) -> Structure:
    """Return the structure in a JSON text. Raises InvalidRequest that says what is wrong."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"is not JSON: {error}") from None
    if not isinstance(given, dict) or len(given) != 1:
        raise _refusal(f"must be an object with exactly one of the keys {', '.join(_KINDS)}")
    ((kind, value),) = given.items()
    if kind not in _KINDS:
        raise _refusal(f"has the key {str(kind)[:40]!r}; allowed are {', '.join(_KINDS)}")
    if kind == "json" and isinstance(value, str):
        value = _schema_in(value)
    if kind == "json" and value is True:
        value = {}
    if not isinstance(value, _KINDS[kind]):
        raise _refusal(f"{kind} must be {_NAMES[_KINDS[kind]]}; got {type(value).__name__}")
    if kind == "json_object" and value is not True:
        raise _refusal("json_object must be true")
    if kind == "choice" and not (0 < len(value) <= MAX_CHOICES and all(isinstance(each, str) for each in value)):
        raise _refusal(f"choice must be a list of 1 to {MAX_CHOICES} strings")
    if kind == "structural_tag":
        _check_tags(value)
    if depth_of(value) > MAX_DEPTH:
        raise _refusal(f"{kind} has more than {MAX_DEPTH} levels")
    return Structure(kind, value)


def _check_tags(value: dict[str, Any]) -> None:
    """Raise InvalidRequest unless every structure begins with a trigger."""
    structures, triggers = value.get("structures"), value.get("triggers")
    for name, given in (("structures", structures), ("triggers", triggers)):
        if not isinstance(given, list) or not 0 < len(given) <= MAX_TAGS:
            raise _refusal(f"structural_tag.{name} must be a list of 1 to {MAX_TAGS}")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers or ()):
        raise _refusal("structural_tag.triggers must be strings that are not empty")
    for position, each in enumerate(structures or ()):
        where = f"structural_tag.structures[{position}]"
        if not isinstance(each, dict) or not isinstance(each.get("schema"), dict):
            raise _refusal(f'{where} must be {{"begin": "…", "schema": {{…}}, "end": "…"}}')
        begin, end = each.get("begin"), each.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise _refusal(f"{where}: begin and end must be strings")
        if not begin.startswith(tuple(triggers or ())):
            raise _refusal(f"{where}.begin must start with one of the triggers")


def _schema_in(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"json is text, but not a schema in JSON: {error}") from None


def structure_text(given: Any) -> str:
    """Return the JSON text of a structure: of a mapping, of a pydantic model, or the text itself. Raises TypeError."""
    if isinstance(given, str):
        return given
    if hasattr(given, "model_json_schema"):
        given = {"json": given.model_json_schema()}
    if not isinstance(given, Mapping):
        raise TypeError(f"structured_outputs is a mapping, its JSON text or a pydantic model, not {given!r}")
    return json.dumps(given, separators=(",", ":"))


def depth_of(value: Any) -> int:
    """Return the levels of nested lists and objects, counted up to a little more than MAX_DEPTH."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [member for members in inner for member in members]
        depth += 1
    return depth


def _refusal(fault: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs {fault}", field=FIELD)
