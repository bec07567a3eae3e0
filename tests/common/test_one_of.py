"""`oneOf` is taken where no answer can fit two branches, and refused by its place everywhere else."""

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import jsonschema_rs
import pytest

from common.errors import InvalidRequest
from common.one_of import with_disjoint_branches
from common.structured_outputs import structure_text
from tests.builders import FAKE_GRAMMARS
from tests.engine.schemas import random_schema

TEXT, WHOLE, TAG_A, TAG_B = {"type": "string"}, {"type": "integer"}, {"const": "a"}, {"const": "b"}


def tagged(tag: Any, *, required: bool = True, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": tag}, "required": ["kind"] if required else [], **more}


DISJOINT: list[list[Any]] = [
    [TEXT, WHOLE, {"type": "null"}],
    [{"type": ["string", "null"]}, {"enum": [1, True, [1]]}],
    [{"const": 1}, {"const": 2}, {"const": True}],
    [WHOLE | {"maximum": 3}, {"type": "number", "minimum": 3.5}],
    [TEXT | {"maxLength": 2}, TEXT | {"minLength": 3}],
    [tagged(TAG_A), tagged(TAG_B)],
    [tagged({"enum": ["a", "c"]}), tagged({"enum": ["b", "d"]})],
    [{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/b"}, {"required": ["kind"]}]}],
    [tagged(TEXT), {"type": "object", "properties": {"other": {}}, "additionalProperties": False}],
    [{"anyOf": [TEXT, WHOLE]}, {"oneOf": [{"type": "null"}, {"type": "boolean"}]}],
    [False, TEXT],
]
OVERLAPPING: list[list[Any]] = [
    [WHOLE, {"type": "number"}],
    [{"const": 1}, {"const": 1.0}],
    [TEXT | {"maxLength": 3}, TEXT | {"minLength": 3}],
    [tagged(TAG_A), tagged(TAG_B, required=False)],
    [{"required": ["a"]}, {"required": ["b"]}],
    [{"properties": {"kind": TAG_A}, "required": ["kind"]}, {"properties": {"kind": TAG_B}, "required": ["kind"]}],
    [True, TEXT],
    [{"$ref": "https://example.org/a"}, {"$ref": "https://example.org/b"}],
    [{"type": "array", "minItems": 1}, {"type": "array", "maxItems": 3}],
]
DEFINITIONS = {"a": tagged(TAG_A), "b": {"type": "object", "properties": {"kind": TAG_B}}}


@pytest.mark.parametrize("branches", DISJOINT)
def test_branches_that_exclude_each_other_are_taken(branches: list[Any]) -> None:
    schema = {"properties": {"x": {"oneOf": branches}}, "$defs": DEFINITIONS}
    assert with_disjoint_branches(schema) == schema


@pytest.mark.parametrize("branches", OVERLAPPING)
def test_branches_that_may_fit_together_are_refused_by_their_place(branches: list[Any]) -> None:
    schema = {"properties": {"x": {"items": {"oneOf": branches}}}, "$defs": DEFINITIONS}
    with pytest.raises(ValueError, match=r"^#/properties/x/items/oneOf: .*branch 0 and branch 1"):
        with_disjoint_branches(schema)


def test_discriminator_makes_its_property_required() -> None:
    branches = [tagged(TAG_A, required=False), tagged(TAG_B, required=False)]
    schema = with_disjoint_branches({"oneOf": branches, "discriminator": {"propertyName": "kind"}})
    assert jsonschema_rs.is_valid(schema, {"kind": "a"})
    assert not jsonschema_rs.is_valid(schema, {})


def test_reference_within_a_resource_of_its_own_proves_nothing() -> None:
    inner = {"$id": "https://example.org/i", "oneOf": DISJOINT[7], "$defs": {"a": tagged(TAG_B), "b": tagged(TAG_B)}}
    with pytest.raises(ValueError, match="may fit"):
        with_disjoint_branches({"properties": {"x": inner}, "$defs": DEFINITIONS})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"oneOf": [{"$ref": "#a"}, TEXT]}}, "$defs": {"d": {"$anchor": "a", **TEXT}}},
        {"properties": {"x": {"oneOf": [{"$ref": "#/$defs/a%20b"}, TEXT]}}, "$defs": {"a b": TEXT, "a%20b": WHOLE}},
        {"properties": {"x": {"$ref": "#/default"}}, "default": {"oneOf": [WHOLE, {"type": "number"}]}},
        {"properties": {"x": {"$ref": "#/z/0/0"}}, "z": [[{"oneOf": [WHOLE, {"type": "number"}]}]]},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "definitions": {"a": WHOLE},
            "properties": {
                "x": {"id": "urn:i", "oneOf": [{"$ref": "#/definitions/a"}, TEXT], "definitions": {"a": TEXT}}
            },
        },
    ],
)
def test_overlap_behind_any_reference_is_found(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="branch 0 and branch 1"):
        with_disjoint_branches(schema)


def test_branch_that_something_refers_to_keeps_its_meaning() -> None:
    union = {"oneOf": [tagged(TAG_A, required=False), tagged(TAG_B)], "discriminator": {"propertyName": "kind"}}
    with pytest.raises(ValueError, match="branch 0 and branch 1"):
        with_disjoint_branches({"properties": {"x": union, "y": {"$ref": "#/properties/x/oneOf/0"}}})


def expressions(num_kinds: int, *names: str) -> dict[str, Any]:
    """Return a union of objects that hold further ones of their kind."""
    inner = {name: {"$ref": "#/$defs/E"} for name in names}
    kinds = {
        f"K{number}": {
            "type": "object",
            "properties": {"kind": {"const": number}, **inner},
            "required": ["kind", *names],
            "additionalProperties": False,
        }
        for number in range(num_kinds)
    }
    return {"$ref": "#/$defs/E", "$defs": {"E": {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in kinds]}, **kinds}}


@pytest.mark.parametrize("schema", [expressions(5, "a", "left", "right"), expressions(300, "a", "z")])
def test_unions_that_hold_themselves_and_large_ones_are_proved_by_their_tags(schema: dict[str, Any]) -> None:
    assert with_disjoint_branches(schema) == schema


def test_work_is_bounded_and_the_same_in_every_process() -> None:
    untagged = expressions(4, "a", "left", "right", "z")
    for number in range(4):
        each = untagged["$defs"][f"K{number}"]
        del each["properties"]["kind"]
        each["required"].remove("kind")
    many = {"oneOf": [tagged({"type": "array", "minItems": 2 * i, "maxItems": 2 * i + 1}) for i in range(200)]}
    code = "import json, sys, common.one_of as o\nfor each in json.load(sys.stdin):\n"
    code += " try: o.with_disjoint_branches(each)\n except ValueError as error: print(error)"
    told = set()
    for seed in ("0", "1", "3"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps([untagged, many]),
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        told.add(done.stdout)
    (text,) = told
    assert "branch 0 and branch 1" in text
    assert "take too long to compare" in text


def test_names_of_properties_and_data_are_no_schemas() -> None:
    schema = {"properties": {"oneOf": TEXT, "const": {"oneOf": [TEXT, WHOLE]}}, "default": {"oneOf": 1, "id": "a"}}
    assert with_disjoint_branches(schema) == schema
    branches = [tagged(TAG_A, required=False), tagged(TAG_B, required=False)]
    union = {"oneOf": branches, "discriminator": {"propertyName": "kind"}}
    assert with_disjoint_branches({"properties": {"default": union}})["properties"]["default"] != union


@pytest.mark.parametrize("broken", [{"type": [{}]}, {"required": 3}, {"allOf": 1}, {"enum": 2}, {"oneOf": {}}])
def test_broken_schemas_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        FAKE_GRAMMARS.compile(structure_text({"json": {"oneOf": [broken, TEXT]}}))


def test_no_value_fits_two_branches_that_were_taken() -> None:
    texts = ["", "a", "ab", "bcd", "aad", "12-34", "yy", "xyyy", "2026-01-31", "red", 'gr"een', "x", "日本"]
    numbers = [*range(-60, 160), *(each + 0.5 for each in range(-10, 30)), -1.5]
    values: list[Any] = [None, True, False, {}, [], [1, 2], {"k": [1]}, *texts, *numbers]
    values += [[value] for value in values] + [{name: value} for name in ("a", "b c") for value in values[:20]]
    num_taken = 0
    for first, second in itertools.combinations([random_schema(seed) for seed in range(60)], 2):
        if "$defs" in first or "$defs" in second:
            continue
        try:
            with_disjoint_branches({"oneOf": [first, second]})
        except ValueError:
            continue
        num_taken += 1
        fits = [jsonschema_rs.validator_for(each).is_valid for each in (first, second)]
        assert not [value for value in values if fits[0](value) and fits[1](value)], (first, second)
    assert num_taken > 100
