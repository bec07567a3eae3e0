"""`oneOf` in JSON schemas: an answer fits exactly one of the branches only if no two of them can fit together.

The library of grammars takes any branch that fits, which is the same where the branches are disjoint. What cannot be
proved so (disjoint_schemas.py) is refused.
"""

import re
from collections.abc import Iterator
from typing import Any

from common.disjoint_schemas import DisjointnessProver, Schema, TooMuchWorkError, list_in

_OLD_DRAFTS = re.compile(r"draft-0[34]")
"""Drafts with `id` instead of `$id`."""
_DATA = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are not schemas."""
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values map names to schemas."""


def with_disjoint_branches(schema: Schema) -> Schema:
    """Return the schema with the property of every `discriminator` required, which tells its branches apart.

    Raises ValueError that names the place of a `oneOf` with two branches that may fit together.
    """
    places = list(_objects_in(schema, "#"))
    if not any(isinstance(inner.get("oneOf"), list) for _where, inner in places):
        return schema
    # A reference into a branch would change its meaning with the branch.
    if not any("/oneOf/" in str(inner.get("$ref")) for _where, inner in places):
        schema = _with_tags(schema)
        places = list(_objects_in(schema, "#"))
    prover = DisjointnessProver(schema, has_resources=_has_resources(schema, [inner for _where, inner in places[1:]]))
    for where, inner in places:  # all of them: a reference may make a schema of any
        try:
            overlap = prover.overlap(list_in(inner, "oneOf"))
        except TooMuchWorkError:
            raise ValueError(f"{where}/oneOf: its branches take too long to compare; use anyOf") from None
        if overlap is not None:
            raise ValueError(
                f"{where}/oneOf: one answer may fit branch {overlap[0]} and branch {overlap[1]};"
                " use anyOf, or give them a required property with different constants"
            )
    return schema


def _objects_in(value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object within a value, with its place."""
    if isinstance(value, dict):
        yield where, value
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in members:
        if isinstance(inner, dict | list):
            yield from _objects_in(inner, f"{where}/{name}")


def _has_resources(whole: dict[str, Any], inner: list[dict[str, Any]]) -> bool:
    """Return whether references within may mean something else than in the whole."""
    names = ("$id", "id") if _OLD_DRAFTS.search(str(whole.get("$schema"))) else ("$id",)
    return any(isinstance(each.get(name), str) for each in inner for name in names)


def _with_tags(schema: Schema) -> Schema:
    """Return a copy in which the branches of discriminated unions require their tag."""
    if isinstance(schema, list):
        return [_with_tags(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            copy[key] = {name: _with_tags(inner) for name, inner in value.items()}
        else:
            copy[key] = value if key in _DATA else _with_tags(value)
    discriminator = copy.get("discriminator")
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(tag, str) and (branches := list_in(copy, "oneOf")):
        copy["oneOf"] = [_requiring(branch, tag) for branch in branches]
    return copy


def _requiring(branch: Schema, tag: str) -> Schema:
    if not isinstance(branch, dict):
        return branch
    if "$ref" in branch:
        return {"allOf": [branch, {"required": [tag]}]}
    if not isinstance(branch.get("required", []), list):
        return branch  # the compiler refuses it
    return {**branch, "required": [*(name for name in branch.get("required", []) if name != tag), tag]}
