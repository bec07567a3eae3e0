"""The documents tell of every field what the door does with it."""

from pathlib import Path

import pytest

from router.http.routes import ENDPOINTS
from tests.router.http.field_table import APIS, fields_of, write_tables

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("document", ["openai.md", "anthropic.md"])
async def test_table_of_fields_says_what_the_door_does_with_each(document: str) -> None:
    told = (DOCS / document).read_text(encoding="utf-8")
    assert await write_tables(told) == told, f"python -m tests.router.http.field_table docs/{document}"


def test_every_api_with_a_body_has_its_fields_in_a_table() -> None:
    paths = {each.path for each in ENDPOINTS if each.body is not None and each.path.startswith("/v1/")}
    assert {api.path for api in APIS.values()} == paths


@pytest.mark.parametrize("name", APIS)
def test_every_field_has_a_value_to_send(name: str) -> None:
    missing = fields_of(APIS[name]) - APIS[name].values.keys()
    assert not missing, f"add a value for each to tests/router/http/field_values.py: {sorted(missing)}"
