"""Schemas by chance, with most keywords of JSON Schema that llguidance takes, and those of JSON-Schema-Test-Suite."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
_PATTERNS = ("^[a-z]{1,4}$", "^(a|bc)+d$", "^[0-9]{2}-[0-9]{2}$", "^x?y{2,3}$")
_FORMATS = ("date", "time", "ipv4", "uuid")


@dataclass(frozen=True, slots=True)
class SuiteGroup:
    """A schema of the suite."""

    keyword: str
    """What it tests, as the suite's file names it."""
    description: str
    schema: Any
    tests: list[tuple[Any, bool]]
    """Instances, and whether they fit the schema."""

    def __str__(self) -> str:
        return f"{self.keyword}: {self.description}"


def suite() -> list[SuiteGroup]:
    """Return the groups of JSON-Schema-Test-Suite for draft 2020-12."""
    path = Path(__file__).parents[1] / "data" / "json_schema_suite" / "draft2020-12.jsonl"
    return [SuiteGroup(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def random_schema(seed: int) -> Schema:
    """Return the schema of a seed; its shortest instances are short."""
    chance = random.Random(seed)
    schema = _schema(chance, depth=3)
    if chance.random() < 0.2:
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}, "b": schema}, "required": ["a"]}
        schema |= {"additionalProperties": False, "$defs": {"d": _schema(chance, depth=1)}}
    return schema


def _schema(chance: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random], Schema]] = [_string, _integer, _number, _enum, _constant, _simple]
    if not depth or chance.random() < 0.3:
        return chance.choice(leaves)(chance)
    return chance.choice((_array, _object, _any_of, _all_of))(chance, depth - 1)


def _string(chance: random.Random) -> Schema:
    match chance.randrange(3):
        case 0:
            return {"type": "string", "pattern": chance.choice(_PATTERNS)}
        case 1:
            return {"type": "string", "format": chance.choice(_FORMATS)}
    least = chance.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(1, 5)}


def _integer(chance: random.Random) -> Schema:
    least = chance.randrange(-50, 50)
    schema: Schema = {"type": "integer", "minimum": least, "maximum": least + chance.randrange(12, 2000)}
    if chance.random() < 0.3:
        schema["multipleOf"] = chance.choice((2, 5, 10))
    if chance.random() < 0.2:
        schema["exclusiveMaximum"] = schema.pop("maximum")
    return schema


def _number(chance: random.Random) -> Schema:
    least = chance.randrange(-9, 9)
    return {"type": "number", "minimum": least, "maximum": least + chance.randrange(1, 100)}


def _enum(chance: random.Random) -> Schema:
    return {"enum": chance.sample(["red", 'gr"een', "b\\lue", "naïve", 7, -1.5, None, True, [1, 2], {"a": "b"}], 3)}


def _constant(chance: random.Random) -> Schema:
    return {"const": chance.choice(["x", "日本", 12, None, {"k": [1]}])}


def _simple(chance: random.Random) -> Schema:
    return {"type": chance.choice(["boolean", "null", ["boolean", "null"]])}


def _array(chance: random.Random, depth: int) -> Schema:
    if chance.random() < 0.3:
        fixed = [_schema(chance, depth) for _ in range(chance.randrange(1, 3))]
        return {"type": "array", "prefixItems": fixed, "items": False, "minItems": len(fixed)}
    least = chance.randrange(2)
    return {"type": "array", "items": _schema(chance, depth), "minItems": least, "maxItems": least + 2}


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(["a", "b c", "ünï", "$d", 'e"f', "g_1"], chance.randrange(1, 4))
    required = chance.sample(names, chance.randrange(len(names) + 1))
    properties = {name: _schema(chance, depth) for name in names}
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    schema["additionalProperties"] = False
    return schema


def _any_of(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(chance, depth) for _ in range(2)]}


def _all_of(chance: random.Random, _depth: int) -> Schema:
    least = chance.randrange(50)
    return {"allOf": [{"type": "integer", "minimum": least}, {"maximum": least + 30}]}
