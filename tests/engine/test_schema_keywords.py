"""Every keyword of JSON Schema is kept to, ignored or refused as docs/client.md says."""

import re
from pathlib import Path
from typing import Any

import pytest

from common.chat.grammars import tool_grammar
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
    "then": {"if": TEXT, "then": WHOLE},
    "else": {"if": TEXT, "else": WHOLE},
    "uniqueItems": LIST | {"uniqueItems": True},
    "contains": LIST | {"contains": WHOLE},
    "minContains": LIST | {"contains": WHOLE, "minContains": 1},
    "maxContains": LIST | {"contains": WHOLE, "maxContains": 1},
    "unevaluatedItems": LIST | {"unevaluatedItems": False},
    "propertyNames": OBJECT | {"propertyNames": {"pattern": "^a"}},
    "dependentRequired": OBJECT | {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": OBJECT | {"dependentSchemas": {"a": {"required": ["b"]}}},
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


def test_formats_are_kept_to_and_unknown_ones_are_annotations() -> None:
    for name in FORMATS:
        assert not fits(TEXT | {"format": name}, '"?"'), name
    for name in ("zip", "byte", "binary", "password", "path", "uri-reference", "iri", "json-pointer", "regex"):
        assert fits(TEXT | {"format": name}, '"?"'), name
    assert fits(WHOLE | {"format": "int64"}, "5")
    assert not fits(TEXT | {"format": "uuid4"}, '"?"')


SAY_NOTHING: list[tuple[Schema, str]] = [
    (LIST | {"uniqueItems": False}, "[1, 1]"),
    (LIST | {"uniqueItems": True, "maxItems": 1}, "[1]"),
    (OBJECT | {"propertyNames": {"type": "string"}}, '{"a": 1}'),
    (OBJECT | {"propertyNames": {"title": "Name"}}, '{"a": 1}'),
    (OBJECT | {"propertyNames": True}, '{"a": 1}'),
    (TEXT | {"not": False}, '"a"'),
    (TEXT | {"not": {"not": {}}}, '"a"'),
    (TEXT | {"then": WHOLE, "else": WHOLE}, '"a"'),
    (TEXT | {"if": WHOLE, "then": True}, '"a"'),
    (LIST | {"minContains": 2}, "[]"),
    (LIST | {"contains": WHOLE, "minContains": 0}, "[]"),
    (OBJECT | {"dependentRequired": {"a": []}, "dependentSchemas": {"a": {}}}, '{"a": 1}'),
    (OBJECT | {"unevaluatedProperties": True, "unevaluatedItems": {}}, '{"a": 1}'),
    (TEXT | {"$dynamicAnchor": "a"}, '"a"'),
    (LIST | {"items": {"anyOf": [TEXT | {"format": "byte"}, OBJECT | {"propertyNames": TEXT}]}}, '["a", {"b": 1}]'),
]


@pytest.mark.parametrize(("schema", "text"), SAY_NOTHING, ids=range(len(SAY_NOTHING)))
def test_keyword_whose_value_allows_everything_is_left_out(schema: Schema, text: str) -> None:
    assert fits(schema, text)
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    FAKE_GRAMMARS.compile(structure_text({"grammar": tool_grammar("hermes", [tool], name="f", parallel=False)}))


ODD: tuple[Any, ...] = (None, True, 5, 1e400, "a", [], [{}], {}, {"a": [1]}, [[2**70]])


@pytest.mark.parametrize("keyword", sorted({*KEPT, *REFUSED, "format", "x-guidance"}))
def test_keywords_with_values_of_any_kind_are_compiled_or_refused(keyword: str) -> None:
    others: list[Schema] = [{}, {"type": [{}]}, WHOLE | {"exclusiveMinimum": 2**60}, {"const": 2**63 + 1}]
    for value in ODD:
        for beside in others:
            try:
                FAKE_GRAMMARS.compile(structure_text({"json": beside | {keyword: value}}))
            except InvalidRequest:
                continue


def test_names_and_values_like_keywords_are_no_keywords() -> None:
    named = OBJECT | {"properties": {"format": WHOLE, "not": {"const": {"format": "zip", "uniqueItems": False}}}}
    assert fits(named, '{"format": 1, "not": {"format": "zip", "uniqueItems": false}}')
    assert not fits(named, '{"format": "a"}')


SNOWFLAKE, LEAST, MOST = 1234567890123456789, -(2**63), 2**63 - 1


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (WHOLE | {"minimum": LEAST, "maximum": MOST}, "-9007199254740993", '"a"'),
        (WHOLE | {"minimum": LEAST}, "-5", "1.5"),
        (WHOLE | {"minimum": 0, "maximum": 2**64 - 1}, "5", "-1"),
        (WHOLE | {"exclusiveMinimum": -1, "exclusiveMaximum": 2**63}, "0", "-1"),
        (WHOLE | {"minimum": 2**60, "maximum": 2**60}, str(2**60), str(2**60 + 1)),
        ({"type": "number", "maximum": 1.7976931348623157e308}, "1e300", '"a"'),
        ({"const": SNOWFLAKE}, str(SNOWFLAKE), "1234567890123456768"),
        ({"enum": [LEAST, 1, {"id": 2**53 + 1}]}, '{"id": 9007199254740993}', "2"),
        ({"enum": [LEAST, 1]}, str(LEAST), "-9223372036854776000"),
        ({"type": ["integer", "null"], "enum": [LEAST, None, "a"]}, str(LEAST), '"a"'),
        ({"title": "Last", "const": MOST}, str(MOST), "1"),
    ],
)
def test_whole_numbers_are_exact_beyond_those_of_floats(schema: Schema, right: str, wrong: str) -> None:
    assert fits(schema, right)
    assert not fits(schema, wrong)


@pytest.mark.parametrize(
    ("inner", "place"),
    [
        ({"const": SNOWFLAKE}, "const: 1234567890123456789 "),
        ({"enum": [1, [2**53 + 1]]}, "enum: "),
        (WHOLE | {"minimum": SNOWFLAKE}, "minimum: 1234567890123456789 "),
        (WHOLE | {"exclusiveMinimum": 2**53}, "minimum: 9007199254740993 "),
        (WHOLE | {"minimum": 2**63}, "minimum: 9223372036854775808 "),
    ],
)
def test_whole_numbers_that_cannot_be_exact_are_refused_by_place(inner: Schema, place: str) -> None:
    with pytest.raises(InvalidRequest, match=f"#/properties/a/{place}"):
        FAKE_GRAMMARS.compile(structure_text({"json": OBJECT | {"properties": {"a": inner}}}))


def test_guide_has_every_keyword_and_format_in_its_place() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (kept to|ignored|refused|formats) \| (.*) \|$", guide, flags=re.MULTILINE))
    named = {place: set(re.findall(r"`([^`]+)`", text)) for place, text in rows.items()}
    assert named["kept to"] == KEPT.keys() | {"oneOf"}
    assert named["refused"] == REFUSED.keys()
    assert named["ignored"] == IGNORED.keys()
    assert named["formats"] == set(FORMATS)
