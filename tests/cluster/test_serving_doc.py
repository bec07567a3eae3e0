"""docs/serving.md lists every key of serving.yaml with its default, and no other."""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from cluster.changes.diff import in_yaml
from common.config import PoolConfig, ServingConfig, TenantConfig

_DOC = Path(__file__).parents[2] / "docs" / "serving.md"
_ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| `([^`]*)` \| \S.*\|$", re.MULTILINE)


def keys(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key below a section with its default as YAML writes it; pools once, with no prefix; one tenant."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if name == "pools":
            yield from keys(PoolConfig())
        elif name == "tenants":
            yield name, in_yaml(value)
            tenant = dict(keys(TenantConfig(name="some"), "tenants."))
            yield from (tenant | {"tenants.name": "required"}).items()
        elif isinstance(value, BaseModel):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", in_yaml(value)


def test_serving_doc_lists_every_key_with_its_default() -> None:
    configuration = _DOC.read_text(encoding="utf-8").partition("## Environment")[0]

    assert dict(_ROW.findall(configuration)) == dict(keys(ServingConfig()))
