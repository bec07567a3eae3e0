"""JSON-Schema-Test-Suite: what is compiled allows no answer that does not fit, and hardly forbids one that does."""

import json
from collections import Counter

from common.errors import InvalidRequest
from common.structured_outputs import structure_text
from tests.builders import FAKE_GRAMMARS
from tests.engine.schemas import suite
from tests.engine.test_schema_keywords import fits

NARROWER = {"format", "const", "enum", "type", "allOf"}
"""Files of the suite with instances that fit but are no answers: with a format's text that only annotates, with 1.0 for
an integer, with properties in another order than the schema's."""
NUM_TAKEN = {"oneOf": 2, "anyOf": 7, "allOf": 10, "ref": 29}
"""Fewest schemas that are compiled, of some files."""


def test_whatever_is_compiled_allows_what_fits_and_nothing_else() -> None:
    taken = Counter[str]()
    for group in suite():
        if not isinstance(group.schema, dict):
            continue
        structure = structure_text({"json": group.schema})
        try:
            FAKE_GRAMMARS.compile(structure)
        except InvalidRequest as refusal:
            assert len(str(refusal)) > len("structured_outputs cannot be compiled: json: "), group
            continue
        taken[group.keyword] += 1
        for instance, is_valid in group.tests:
            text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
            does_fit = fits(group.schema, text)
            assert does_fit <= is_valid, f"{group}: {text} is allowed"
            assert does_fit == is_valid or group.keyword in NARROWER, f"{group}: {text} is forbidden"
    assert taken >= Counter(NUM_TAKEN)
    assert taken.total() >= 160
