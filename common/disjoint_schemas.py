"""Proves that no value fits two JSON schemas, from types, values, ranges, and properties that distinguish objects.

The proof depends on the schemas alone, and its work is bounded.
"""

import json
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

Schema = Any
"""A schema in JSON: an object, true or false."""

MAX_WORK = 50_000
"""Bound on the work for one structure, in keywords, names and values looked at: a tenth of a second."""
_COMPARISON_WORK = 10
_KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_KIND_OF: Mapping[type, str] = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array"}
_RANGES: Mapping[str, tuple[str, str]] = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
}


@dataclass(slots=True)
class _Facts:
    """Properties that all instances of some schemas share; keywords that are not looked at only allow fewer."""

    kinds: Set[str] = _KINDS
    values: Set[str] | None = None
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

    def add(self, schema: dict[str, Any]) -> None:
        """Add the constraints of a schema itself, apart from its constants."""
        if "type" in schema:
            given = {name for name in list_in(schema, "type") or [schema["type"]] if isinstance(name, str)}
            self.kinds &= given | ({"integer"} if "number" in given else set())
        for keywords in _RANGES.values():
            for keyword, choose in zip(keywords, (max, min), strict=True):
                bound = schema.get(keyword)
                if isinstance(bound, int | float):
                    self.ranges[keyword] = choose(self.ranges.get(keyword, bound), bound)
        properties = schema.get("properties")
        names = dict[str, Schema](properties) if isinstance(properties, dict) else {}
        for name, inner in names.items():
            self.properties.setdefault(name, []).append(inner)
        self.required |= {name for name in list_in(schema, "required") if isinstance(name, str)}
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            self.only = names.keys() if self.only is None else self.only & names.keys()
        self.alternatives += [branches for keyword in ("anyOf", "oneOf") if (branches := list_in(schema, keyword))]

    def limit(self, kinds: Set[str], values: Set[str]) -> None:
        """Allow these values alone, which are of these kinds."""
        self.kinds &= kinds
        self.values = values if self.values is None else self.values & values


class TooMuchWorkError(Exception):
    """The bound on the work is reached."""


_Parts = tuple[Schema, ...]
"""Schemas that an instance fits all of."""
_Key = tuple[int, ...]
"""Identities of parts, which live as long as the whole schema."""


class DisjointnessProver:
    """Proves that branches of one schema are disjoint."""

    def __init__(self, whole: Schema, *, has_resources: bool) -> None:
        """With `has_resources`, "#" does not always mean the whole; references then constrain nothing."""
        self._whole = None if has_resources else whole
        self._facts: dict[_Key, _Facts] = {}
        self._constants: dict[tuple[int, str], tuple[Set[str], Set[str]]] = {}
        """Kinds and values that `const` or `enum` of a schema allows; they may be large."""
        self._are_disjoint: dict[tuple[_Key, _Key], bool] = {}
        self._work_left = MAX_WORK

    def overlap(self, branches: list[Schema]) -> tuple[int, int] | None:
        """Return two branches that may fit together; None if it is certain that none do. Raises TooMuchWorkError."""
        if self._differ_in_values(branches):
            return None
        for second in range(len(branches)):
            for first in range(second):
                if not self._disjoint((branches[first],), (branches[second],)):
                    return first, second
        return None

    def _differ_in_values(self, branches: list[Schema]) -> bool:
        """Return whether all branches are objects with a required property whose possible values differ; fast."""
        facts = [self._facts_of((branch,)) for branch in branches]
        if not facts or not all(each.kinds <= {"object"} for each in facts):
            return False
        for name in sorted(facts[0].required):
            taken, count = set[str](), 0
            for each in facts:
                inner = each.properties.get(name) if name in each.required else None
                values = None if inner is None else self._facts_of(tuple(inner)).values
                if values is None:
                    break
                taken |= values
                count += len(values)
            else:
                if len(taken) == count:
                    return True
        return False

    def _disjoint(self, first: _Parts, second: _Parts) -> bool:
        """Return whether it is certain that no value fits both."""
        key = tuple(map(id, first)), tuple(map(id, second))
        found = self._are_disjoint.get(key)
        if found is None:
            self._are_disjoint[key] = False  # while it is compared: a proof must not rest on itself
            found = self._are_disjoint[key] = self._compare(first, second)
        return found

    def _compare(self, first: _Parts, second: _Parts) -> bool:
        mine, theirs = self._facts_of(first), self._facts_of(second)
        self._spend(_COMPARISON_WORK + min(len(mine.required), len(theirs.required)))
        if mine.values is not None and theirs.values is not None and not mine.values & theirs.values:
            return True
        if all(self._are_apart(kind, mine, theirs) for kind in sorted(mine.kinds & theirs.kinds)):
            return True
        return any(
            all(self._disjoint((each,), other) for each in branches)
            for facts, other in ((mine, second), (theirs, first))
            for branches in facts.alternatives
        )

    def _are_apart(self, kind: str, mine: _Facts, theirs: _Facts) -> bool:
        """Return whether it is certain that no value of this kind fits both."""
        least, most = _RANGES.get(kind, ("", ""))
        for one, other in ((mine, theirs), (theirs, mine)):
            if one.ranges.get(most, math.inf) < other.ranges.get(least, -math.inf):
                return True
        if kind != "object":
            return False
        for one, other in ((mine, theirs), (theirs, mine)):
            if other.only is not None and not one.required <= other.only:
                return True
        pairs = [
            (tuple(mine.properties[name]), tuple(theirs.properties[name]))
            for name in sorted(mine.required & theirs.required)
            if name in mine.properties and name in theirs.properties
        ]
        pairs.sort(key=lambda pair: any(self._facts_of(parts).values is None for parts in pair))  # tags first
        return any(self._disjoint(*pair) for pair in pairs)

    def _facts_of(self, parts: _Parts) -> _Facts:
        key = tuple(map(id, parts))
        facts = self._facts.get(key)
        if facts is None:
            facts = self._facts[key] = _Facts()
            self._gather(facts, list(parts))
        return facts

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise TooMuchWorkError

    def _gather(self, facts: _Facts, schemas: list[Schema]) -> None:
        """Add the constraints of the schemas, and of all that they refer to."""
        seen = set[int]()
        while schemas:
            schema = schemas.pop()
            if schema is False:
                facts.kinds = frozenset()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            self._spend(1 + sum(len(value) for value in schema.values() if isinstance(value, dict | list)))
            if isinstance(schema.get("$ref"), str):  # older drafts ignore what is beside it
                schemas.append(self._referred(schema["$ref"]))
                continue
            facts.add(schema)
            for keyword in ("const", "enum"):
                if keyword in schema:
                    facts.limit(*self._constants_in(schema, keyword))
            schemas += list_in(schema, "allOf")

    def _constants_in(self, schema: dict[str, Any], keyword: str) -> tuple[Set[str], Set[str]]:
        key = id(schema), keyword
        if key not in self._constants:
            values = [schema[keyword]] if keyword == "const" else list_in(schema, keyword)
            kinds = frozenset[str]().union(*map(kinds_of, values))
            self._constants[key] = kinds, frozenset(map(_canonical, values))
        return self._constants[key]

    def _referred(self, reference: str) -> Schema:
        """Return the schema that a pointer within the whole names; true, which allows all, for other references."""
        path, *names = reference.split("/")
        if path != "#" or "%" in reference:
            return True
        found: Any = self._whole
        for name in (each.replace("~1", "/").replace("~0", "~") for each in names):
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return True
        return found


def list_in(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the list under a keyword; an empty one for anything else, which the compiler refuses."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def kinds_of(value: Any) -> frozenset[str]:
    """Return the types that a value is of."""
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
