"""Tells of which JSON types the arguments of tools may be, and gives plain text the type that fits.

Some markups write every value as plain text; only the schema of the tool tells whether `5` is a number or a word.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.chat.json_reader import object_in

Types = frozenset[str]
ToolTypes = Mapping[str, Mapping[str, Types]]
"""Types of the parameters of tools, by the names of both."""

ANY_TYPE: Types = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
TEXT: Types = frozenset({"string"})


def parameter_types(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return the types of the parameters of functions, as JSON."""
    types = {}
    for function in functions:
        schema = function.get("parameters") or {}
        properties = schema.get("properties")
        named = properties.items() if isinstance(properties, Mapping) else ()
        found: dict[str, Types] = {}
        types[function["name"]] = {key: sorted(types_of(value, schema, found)) for key, value in named}
    return json.dumps(types, ensure_ascii=False)


def read_parameter_types(text: str) -> ToolTypes:
    """Return what `parameter_types` wrote; empty text: no types are known. Raises ValueError."""
    if not text:
        return {}
    try:
        read = json.loads(text)
        return {name: {key: frozenset(types) for key, types in named.items()} for name, named in read.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"cannot read types of parameters: {error}") from None


def types_of(schema: Any, root: Mapping[str, Any], found: dict[str, Types] | None = None) -> Types:
    """Return the types that a schema within `root` allows, as far as its keywords tell.

    `found`: those of references within `root` so far, so that each is followed once.
    """
    if not isinstance(schema, Mapping):
        return ANY_TYPE
    found = {} if found is None else found
    allowed = ANY_TYPE
    if "type" in schema:
        given = schema["type"]
        allowed &= frozenset(map(str, given if isinstance(given, list) else [given]))
    if "const" in schema or isinstance(schema.get("enum"), list):
        allowed &= frozenset(map(type_of, [schema["const"]] if "const" in schema else schema["enum"]))
    for union in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(union), list):
            allowed &= frozenset().union(*(types_of(each, root, found) for each in branches))
    if isinstance(branches := schema.get("allOf"), list):
        for each in branches:
            allowed &= types_of(each, root, found)
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in found:
            found[reference] = ANY_TYPE  # what it says of itself
            found[reference] = types_of(referred(reference, root), root, found)
        allowed &= found[reference]
    return allowed or ANY_TYPE


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema to which a reference within `root` points; one that allows everything if it is elsewhere."""
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
    return found


def type_of(value: Any) -> str:
    """Return the narrowest JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def typed_json(text: str, types: Types) -> str:
    """Return a value that was written as plain text as JSON of one of some types, and else as a JSON string."""
    found = _json_in(text)
    if found is None:
        return json.dumps(text, ensure_ascii=False)
    kind = type_of(json.loads(found))
    fits = kind != "string" and (kind in types or (kind == "integer" and "number" in types))
    return found if fits or "string" not in types else json.dumps(text, ensure_ascii=False)


def _json_in(text: str) -> str | None:
    """Return the JSON value that a text spells, with small faults mended; None for none."""
    wrapped = object_in(f'{{"":{text}}}')
    if wrapped is None:
        return None
    value = wrapped.removeprefix('{"":')[:-1].strip()
    try:
        json.loads(value)
    except ValueError:
        return None
    return value
