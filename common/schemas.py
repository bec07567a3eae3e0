"""JSON schemas as the library of grammars takes them: without what constrains nothing, and exact in what constrains.

The library refuses keywords that it does not know, also where they say nothing of an answer, and reads numbers as
64-bit floats. What it cannot keep to is refused here by its place, or left to the library to refuse.
"""

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from common.disjoint_schemas import kinds_of, list_in
from common.one_of import with_disjoint_branches

Schema = Any
"""A schema in JSON: an object, true or false."""

FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Formats that answers keep to; all others are annotations."""
MAX_SPACE = 128
"""Most characters of space in a row between the tokens of JSON."""
SPACE = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_SPACE}}}"}
"""The library's option for that; where space has no end, a model may write it forever."""
_UUIDS = frozenset(f"uuid{version}" for version in range(1, 9))
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$id"),
        *("$schema", "$anchor", "contentEncoding", "contentMediaType"),
    )
)
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_SINGLE = frozenset(
    (
        *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else"),
        *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    )
)
_EXACT = 2**53
"""Whole numbers up to here are 64-bit floats."""
_MOST = 2**63 - 1024
"""Largest 64-bit float that is a whole number of 64 bits."""
_FLOAT32_MOST = 3.4e38


def compilable(schema: Schema) -> Schema:
    """Return a schema of the same answers for the library.

    Bounds of a number type's own are narrowed or left out. Raises ValueError that names the place of what cannot be
    kept to exactly.
    """
    return _plain(schema, "#")


def guided(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a whole answer, with the library's options."""
    given = schema.get("x-guidance")
    own = given if isinstance(given, Mapping) else {}
    space = {} if own.get("whitespace_flexible") is False else SPACE
    plain: dict[str, Any] = compilable(with_disjoint_branches(schema))
    return {**plain, "x-guidance": {**space, **own, "coerce_one_of": True}}


def listed(schema: dict[str, Any]) -> list[str] | None:
    """Return the texts of a schema's values where it lists some that the library would change; else None."""
    lists = schema.keys() - _ANNOTATIONS - {"type", "format"}
    values = schema.get("enum") if lists == {"enum"} else [schema["const"]] if lists == {"const"} else None
    if not isinstance(values, list) or all(map(_is_exact, values)):
        return None
    kinds = {each for each in list_in(schema, "type") or [schema.get("type")] if isinstance(each, str)}
    kinds |= {"integer"} if "number" in kinds else set()
    taken = [value for value in values if not kinds or kinds & kinds_of(value)]
    return [json.dumps(value, ensure_ascii=False) for value in taken]


def _plain(schema: Schema, where: str) -> Schema:
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        place = f"{where}/{key}"
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: _plain(each, f"{place}/{name}") for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            found[key] = [_plain(each, f"{place}/{number}") for number, each in enumerate(value)]
        else:
            found[key] = _plain(value, place) if key in _SINGLE else value
    found = {key: value for key, value in found.items() if not _says_nothing(key, value, found)}
    if found.get("format") in _UUIDS:
        found["format"] = "uuid"
    for key in found.keys() & {"const", "enum"}:
        if not _is_exact(found[key]):
            raise ValueError(f"{where}/{key}: {_short(found[key])} has a whole number that cannot be kept to exactly")
    return _with_bounds(found, where)


def _says_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword allows all answers, so that it can be left out."""
    rule = _EMPTY.get(key)
    return rule is not None and rule(value, schema)


def _is_any(schema: Schema) -> bool:
    return schema is True or (isinstance(schema, dict) and not schema.keys() - _ANNOTATIONS)


def _takes_names(schema: Schema) -> bool:
    """Return whether all names of properties, which are strings, fit a schema."""
    if not isinstance(schema, dict):
        return schema is True
    kinds = schema.get("type", "string")
    return _is_any({key: value for key, value in schema.items() if key != "type"}) and (
        kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    )


def _has_no_branch(_value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a condition has no consequence."""
    return "if" not in schema or all(_is_any(schema.get(key, True)) for key in ("then", "else"))


def _needs_no_item(_value: Any, schema: Mapping[str, Any]) -> bool:
    return "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema)


_EMPTY: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "format": lambda value, _schema: not isinstance(value, str) or value not in FORMATS | _UUIDS,
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems") in (0, 1),
    "propertyNames": lambda value, _schema: _takes_names(value),
    "not": lambda value, _schema: value is False or (isinstance(value, dict) and _is_any(value.get("not", False))),
    **dict.fromkeys(("if", "then", "else"), _has_no_branch),
    **dict.fromkeys(("contains", "minContains", "maxContains"), _needs_no_item),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), lambda value, _schema: _is_any(value)),
    "dependentRequired": lambda value, _schema: isinstance(value, dict) and not any(value.values()),
    "dependentSchemas": lambda value, _schema: isinstance(value, dict) and all(map(_is_any, value.values())),
    "dependencies": lambda value, _schema: value == {},
    **dict.fromkeys(("$dynamicAnchor", "$recursiveAnchor"), lambda _value, _schema: True),
}
"""By keyword: whether a value of it, in a schema, allows all answers."""


def _with_bounds(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a schema whose bounds the library keeps to. Raises ValueError for others."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    is_whole = "integer" in kinds and "number" not in kinds
    found = dict(schema)
    for inclusive, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        edge = found.get(exclusive)
        if is_whole and type(edge) is int and abs(edge) >= _EXACT:
            del found[exclusive]
            other = found.get(inclusive)
            bounds: tuple[Any, Any] = (edge + sign, other if type(other) in (int, float) else edge + sign)
            found[inclusive] = max(bounds) if sign > 0 else min(bounds)
        for key in (inclusive, exclusive):
            bound = found.pop(key, None)
            if type(bound) in (int, float) and abs(bound) > _EXACT:
                bound = _far_bound(bound, f"{where}/{key}", is_whole=is_whole, says_little=bound * sign < 0)
            if bound is not None:
                found[key] = bound
    return found


def _far_bound(bound: float, where: str, *, is_whole: bool, says_little: bool) -> float | None:
    """Return a bound that the library keeps to; None for the end of a type that it cannot. Raises ValueError."""
    if says_little and is_whole and abs(bound) > _MOST:
        return int(math.copysign(_MOST, bound)) if abs(bound) <= 2**63 else None
    if says_little and abs(bound) >= _FLOAT32_MOST:
        return None
    if abs(bound) > _MOST or int(float(bound)) != bound:
        raise ValueError(f"{where}: {_short(bound)} cannot be kept to exactly")
    return bound


def _is_exact(value: Any) -> bool:
    """Return whether the library writes all whole numbers of a value as they are."""
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if type(value) is not int or abs(value) <= _EXACT:
        return True
    if abs(value) < 2**63:
        return min(int(float(value)), 2**63 - 1) == value
    try:
        return value != -(2**63) and int(Decimal(repr(float(value)))) == value
    except OverflowError:
        return False


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
