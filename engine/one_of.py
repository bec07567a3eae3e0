"""`oneOf` in JSON schemas: an answer fits exactly one of the branches only if no two of them can fit together.

llguidance takes any branch that fits, which is the same where the branches are disjoint. This module proves that from
types, values, ranges, and properties that tell objects apart; what it cannot prove is refused.
"""

import json
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

Schema = Any
"""A schema in JSON: an object, true or false."""

_KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_KIND_OF: Mapping[type, str] = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array"}
_RANGES: Mapping[str, tuple[str, str]] = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
}
_DATA = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are no schemas."""
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Keywords whose values map names to schemas."""
_MAX_DEPTH = 16
"""Levels of schemas that are compared."""


def with_disjoint_branches(schema: Schema) -> Schema:
    """Return the schema with the property of every `discriminator` required, which tells its branches apart.

    Raises ValueError that names the place of a `oneOf` with two branches that may fit together.
    """
    tagged = _with_tags(schema)
    places = list(_schemas_in(tagged, "#"))
    has_resources = any("$id" in inner for where, inner in places if where != "#")  # then "#" is not always the whole
    whole = True if has_resources else tagged
    for where, inner in places:
        facts = [_Facts.of(branch, whole) for branch in _list_in(inner, "oneOf")]
        for second, other in enumerate(facts):
            for first in range(second):
                if not _are_disjoint(facts[first], other, whole, _MAX_DEPTH):
                    raise ValueError(
                        f"{where}/oneOf: one answer may fit branch {first} and branch {second};"
                        " use anyOf, or give them a required property with different constants"
                    )
    return tagged


def _with_tags(schema: Schema) -> Schema:
    """Return a copy in which the branches of discriminated unions require their tag."""
    if isinstance(schema, list):
        return [_with_tags(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: value if key in _DATA else _with_tags(value) for key, value in schema.items()}
    discriminator = copy.get("discriminator")
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(tag, str) and (branches := _list_in(copy, "oneOf")):
        copy["oneOf"] = [{"allOf": [branch, {"required": [tag]}]} for branch in branches]
    return copy


def _schemas_in(schema: Schema, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object that is a schema, with its place."""
    if not isinstance(schema, dict):
        return
    yield where, schema
    for key, value in schema.items():
        if key in _DATA:
            continue
        if key in _BY_NAME and isinstance(value, dict):
            for name, inner in value.items():
                yield from _schemas_in(inner, f"{where}/{key}/{name}")
        elif isinstance(value, list):
            for position, inner in enumerate(value):
                yield from _schemas_in(inner, f"{where}/{key}/{position}")
        else:
            yield from _schemas_in(value, f"{where}/{key}")


@dataclass(slots=True)
class _Facts:
    """What all instances of a schema have in common; other keywords only allow fewer."""

    kinds: Set[str] = _KINDS
    values: frozenset[str] | None = None
    """The only values; None: any."""
    ranges: dict[str, float] = field(default_factory=dict)
    """Largest lower and smallest upper bounds, by keyword."""
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Schema]] = field(default_factory=dict)
    """Schemas that the value of a property fits."""
    only: Set[str] | None = None
    """The only names of properties; None: any."""
    alternatives: list[list[Schema]] = field(default_factory=list)
    """Lists of schemas; an instance fits one of each."""

    @classmethod
    def of(cls, schema: Schema, whole: Schema, depth: int = _MAX_DEPTH) -> "_Facts":
        """Return the facts of a schema with those that it refers to."""
        facts = cls()
        facts._add(schema, whole, depth)
        return facts

    def _add(self, schema: Schema, whole: Schema, depth: int) -> None:
        if schema is False:
            self.kinds = frozenset()
        if not isinstance(schema, dict) or not depth:
            return
        if isinstance(schema.get("$ref"), str):  # older drafts ignore what is beside it
            self._add(_referred(schema["$ref"], whole), whole, depth - 1)
            return
        if "type" in schema:
            given = {name for name in _list_in(schema, "type") or [schema["type"]] if isinstance(name, str)}
            self.kinds &= given | ({"integer"} if "number" in given else set())
        if "const" in schema:
            self._limit_values([schema["const"]])
        if "enum" in schema:
            self._limit_values(_list_in(schema, "enum"))
        for keywords in set(_RANGES.values()):
            for keyword, choose in zip(keywords, (max, min), strict=True):
                bound = schema.get(keyword)
                if isinstance(bound, int | float):
                    self.ranges[keyword] = choose(self.ranges.get(keyword, bound), bound)
        properties = schema.get("properties")
        names = dict[str, Schema](properties) if isinstance(properties, dict) else {}
        for name, inner in names.items():
            self.properties.setdefault(name, []).append(inner)
        self.required |= {name for name in _list_in(schema, "required") if isinstance(name, str)}
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            self.only = names.keys() if self.only is None else self.only & names.keys()
        self.alternatives += [branches for keyword in ("anyOf", "oneOf") if (branches := _list_in(schema, keyword))]
        for inner in _list_in(schema, "allOf"):
            self._add(inner, whole, depth - 1)

    def _limit_values(self, values: list[Any]) -> None:
        self.kinds &= frozenset[str]().union(*map(_kinds_of, values))
        named = frozenset(map(_canonical, values))
        self.values = named if self.values is None else self.values & named


def _are_disjoint(first: _Facts, second: _Facts, whole: Schema, depth: int) -> bool:
    """Return whether it is certain that no value fits both."""
    if not depth:
        return False
    if first.values is not None and second.values is not None and not first.values & second.values:
        return True
    for one, other in ((first, second), (second, first)):
        for branches in one.alternatives:
            if all(_are_disjoint(_Facts.of(each, whole), other, whole, depth - 1) for each in branches):
                return True
    return all(_are_apart(kind, first, second, whole, depth) for kind in first.kinds & second.kinds)


def _are_apart(kind: str, first: _Facts, second: _Facts, whole: Schema, depth: int) -> bool:
    """Return whether it is certain that no value of this kind fits both."""
    if kind in _RANGES:
        least, most = _RANGES[kind]
        for one, other in ((first, second), (second, first)):
            if one.ranges.get(most, math.inf) < other.ranges.get(least, -math.inf):
                return True
    if kind != "object":
        return False
    for one, other in ((first, second), (second, first)):
        if other.only is not None and not one.required <= other.only:
            return True
    return any(
        _are_disjoint(_Facts.of({"allOf": mine}, whole), _Facts.of({"allOf": theirs}, whole), whole, depth - 1)
        for name in first.required & second.required
        if (mine := first.properties.get(name)) and (theirs := second.properties.get(name))
    )


def _list_in(schema: dict[str, Any], keyword: str) -> list[Any]:
    """Return the list under a keyword; an empty one for anything else, which the compiler refuses."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _kinds_of(value: Any) -> frozenset[str]:
    if isinstance(value, float):
        return frozenset(("number", "integer") if value.is_integer() else ("number",))
    return frozenset((_KIND_OF.get(type(value), "object"),))


def _canonical(value: Any) -> str:
    """Return a text that is equal for equal values: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_whole_numbers(value), sort_keys=True)


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(each) for key, each in value.items()}
    return value


def _referred(reference: str, whole: Schema) -> Schema:
    """Return the schema that a reference within the whole names; true, which says nothing, for others."""
    if not reference.startswith("#"):
        return True
    found = whole
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found
