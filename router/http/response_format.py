"""Reads what an answer has to look like: `response_format`, in OpenAI's form and in those of others, and tokens."""

from collections.abc import Iterable, Mapping
from typing import Any

from common.errors import InvalidRequest
from router.http.strict import check_members

_SCHEMA_MEMBERS = ("name", "description", "schema", "strict")
_FORMAT_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", *_SCHEMA_MEMBERS),
    "structural_tag": ("structures", "triggers"),
}
"""Types of `response_format`, each with the members that it may have."""


def read_format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the structure of OpenAI's `response_format`; None for text. Raises InvalidRequest."""
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_MEMBERS:
        raise InvalidRequest(
            f"response_format.type must be one of {', '.join(_FORMAT_MEMBERS)}", field="response_format"
        )
    check_members(given, ("type", *_FORMAT_MEMBERS[kind]), "response_format")
    if kind == "text":
        return None
    if kind == "structural_tag":
        return {"structural_tag": {name: given.get(name) for name in _FORMAT_MEMBERS[kind]}}
    named, schema = given.get("json_schema"), given.get("schema")  # other servers take the schema as a member, too
    if isinstance(named, dict):
        check_members(named, _SCHEMA_MEMBERS, "response_format.json_schema")
        schema = named.get("schema") if schema is None else schema
    if schema is None and kind == "json_object":
        return {"json_object": True}
    if not isinstance(schema, dict):
        raise InvalidRequest("response_format.json_schema.schema must be a schema", field="response_format")
    return {"json": schema}


def only_tokens(token_ids: Iterable[int]) -> dict[str, Any]:
    """Return the structure of one or more of some tokens, in any order."""
    return {"grammar": f"start: <[{','.join(map(str, sorted(set(token_ids))))}]>+"}
