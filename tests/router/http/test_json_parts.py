"""JSON made in parts is the JSON of the whole, and no part is long."""

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.http import json_parts as module
from router.http.json_parts import json_parts, members_parts, merged_parts

PART_VALUES = 6
_LISTS = st.lists(st.lists(st.integers(), min_size=1, max_size=5), max_size=6)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner), max_leaves=80
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_VALUES", PART_VALUES)


given_parts = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@given_parts
@given(ANYTHING)
def test_joined_parts_are_the_json_of_the_value(value: Any) -> None:
    assert "".join(json_parts(value)) == json.dumps(value)


@given_parts
@given(st.dictionaries(st.text(max_size=3), LEAVES | st.lists(LEAVES, max_size=2 * PART_VALUES), min_size=1))
def test_members_are_the_json_of_an_object_without_its_brace(value: dict[str, Any]) -> None:
    assert "{" + "".join(members_parts(value)) == json.dumps(value)


@given_parts
@given(st.recursive(st.integers(0, 9), lambda inner: st.lists(inner, max_size=20), max_leaves=80))
def test_no_part_has_more_values_than_are_made_within_some_milliseconds(value: Any) -> None:
    assert all(len(re.findall(r"[0-9]", part)) <= PART_VALUES for part in json_parts(value))


@given_parts
@given(_LISTS)
def test_lists_in_slices_become_whole_lists(slices: list[list[int]]) -> None:
    merged = "".join(merged_parts({"a": each, "b": None} for each in [[], *slices]))
    assert merged == json.dumps({"a": [item for each in slices for item in each], "b": None})
