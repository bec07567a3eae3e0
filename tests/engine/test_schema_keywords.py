"""Every keyword of JSON Schema is kept to, ignored or refused as docs/client.md says."""

import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.structured_outputs import structure_text
from tests.builders import FAKE_GRAMMARS

Schema = dict[str, Any]
TEXT, WHOLE, LIST, OBJECT = ({"type": kind} for kind in ("string", "integer", "array", "object"))
KEPT: dict[str, tuple[Schema, str, str]] = {
    "type": (WHOLE, "1", '"a"'),
    "enum": ({"enum": [1, "b"]}, '"b"', "2"),
    "const": ({"const": [1]}, "[1]", "[2]"),
    "anyOf": ({"anyOf": [TEXT, WHOLE]}, "1", "true"),
    "allOf": ({"allOf": [WHOLE, {"minimum": 5}]}, "5", "4"),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, '"x"', "1"),
    "$defs": ({"$ref": "#/$defs/a", "$defs": {"a": WHOLE}}, "1", '"x"'),
    "minimum": (WHOLE | {"minimum": 3}, "3", "2"),
    "maximum": (WHOLE | {"maximum": 3}, "3", "4"),
    "exclusiveMinimum": (WHOLE | {"exclusiveMinimum": 3}, "4", "3"),
    "exclusiveMaximum": (WHOLE | {"exclusiveMaximum": 3}, "2", "3"),
    "multipleOf": (WHOLE | {"multipleOf": 3}, "9", "10"),
    "minLength": (TEXT | {"minLength": 2}, '"ab"', '"a"'),
    "maxLength": (TEXT | {"maxLength": 2}, '"ab"', '"abc"'),
    "pattern": (TEXT | {"pattern": "^a+$"}, '"aa"', '"ab"'),
    "format": (TEXT | {"format": "date"}, '"2026-01-31"', '"soon"'),
    "items": (LIST | {"items": WHOLE}, "[1]", '["a"]'),
    "prefixItems": (LIST | {"prefixItems": [WHOLE, TEXT]}, '[1, "a"]', '["a"]'),
    "minItems": (LIST | {"minItems": 1}, "[1]", "[]"),
    "maxItems": (LIST | {"maxItems": 1}, "[1]", "[1, 2]"),
    "properties": (OBJECT | {"properties": {"a": WHOLE}}, '{"a": 1}', '{"a": "x"}'),
    "required": (OBJECT | {"properties": {"a": WHOLE}, "required": ["a"]}, '{"a": 1}', "{}"),
    "additionalProperties": (OBJECT | {"additionalProperties": WHOLE}, '{"a": 1}', '{"a": "x"}'),
    "patternProperties": (OBJECT | {"patternProperties": {"^a$": WHOLE}}, '{"a": 1}', '{"a": "x"}'),
    "minProperties": (OBJECT | {"minProperties": 1}, '{"a": 1}', "{}"),
    "maxProperties": (OBJECT | {"maxProperties": 1}, '{"a": 1}', '{"a": 1, "b": 2}'),
}
"""By keyword: a schema, an answer that fits and one that does not."""
REFUSED: dict[str, Schema] = {
    "not": {"not": TEXT},
    "if": {"if": TEXT, "then": {"maxLength": 2}},
    "then": {"then": TEXT},
    "else": {"else": TEXT},
    "uniqueItems": LIST | {"uniqueItems": True},
    "contains": LIST | {"contains": WHOLE},
    "minContains": LIST | {"contains": WHOLE, "minContains": 1},
    "maxContains": LIST | {"contains": WHOLE, "maxContains": 1},
    "unevaluatedItems": LIST | {"unevaluatedItems": False},
    "propertyNames": OBJECT | {"propertyNames": {"pattern": "^a"}},
    "dependentRequired": OBJECT | {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": OBJECT | {"dependentSchemas": {"a": {}}},
    "unevaluatedProperties": OBJECT | {"unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
}
IGNORED: dict[str, Any] = {
    **dict.fromkeys(("title", "description", "$comment", "$anchor", "contentEncoding", "contentMediaType"), "t"),
    "default": 1,
    "examples": [1],
    "deprecated": True,
    "readOnly": True,
    "writeOnly": True,
    "$id": "https://example.org/a",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
}
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def fits(schema: Schema, text: str) -> bool:
    """Return whether an answer may be this text as a whole."""
    grammar = FAKE_GRAMMARS.compile(structure_text({"json": schema}))
    try:
        grammar.check(text.encode())
    except InvalidRequest:
        return False
    state = grammar.begin()
    state.allowed(text.encode())
    return state.is_complete


@pytest.mark.parametrize("keyword", KEPT)
def test_answers_keep_to_the_keyword(keyword: str) -> None:
    schema, right, wrong = KEPT[keyword]
    assert fits(schema, right)
    assert not fits(schema, wrong)


@pytest.mark.parametrize("keyword", REFUSED)
def test_keyword_that_could_not_be_kept_to_is_refused_by_name(keyword: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f'"{keyword}"')):
        FAKE_GRAMMARS.compile(structure_text({"json": REFUSED[keyword]}))


@pytest.mark.parametrize("keyword", IGNORED)
def test_keyword_that_says_nothing_of_the_answer_is_ignored(keyword: str) -> None:
    assert fits(TEXT | {keyword: IGNORED[keyword]}, '"a"')


def test_formats_are_kept_to_and_unknown_ones_refused() -> None:
    for name in FORMATS:
        assert not fits(TEXT | {"format": name}, '"?"'), name
    with pytest.raises(InvalidRequest, match="Unknown format: zip"):
        FAKE_GRAMMARS.compile(structure_text({"json": TEXT | {"format": "zip"}}))


def test_guide_has_every_keyword_and_format_in_its_place() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (kept to|ignored|refused|formats) \| (.*) \|$", guide, flags=re.MULTILINE))
    named = {place: set(re.findall(r"`([^`]+)`", text)) for place, text in rows.items()}
    assert named["kept to"] == KEPT.keys() | {"oneOf"}
    assert named["refused"] == REFUSED.keys()
    assert named["ignored"] == IGNORED.keys()
    assert named["formats"] == set(FORMATS)
