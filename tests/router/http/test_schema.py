"""Bodies of the endpoints: no list or object of them may be as long as a body can be."""

import pytest

from router.http import schema

UNTYPED = {"prompt", "messages"}
"""Lists of several forms: router/http/calls.py bounds them by `check_length`."""
BODIES = (schema.CompletionBody, schema.ChatBody, schema.TokenizeBody, schema.DetokenizeBody)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_list_and_object_of_a_body_has_a_bound(body: type[schema.GenerationBody]) -> None:
    properties = body.model_json_schema()["properties"]
    for name in properties.keys() - UNTYPED:
        for form in properties[name].get("anyOf", [properties[name]]):
            if form.get("type") == "array":
                assert "maxItems" in form, name
            elif form.get("type") == "object":
                assert "maxProperties" in form, name
