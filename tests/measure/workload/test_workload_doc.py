"""docs/loadtest.md lists every key of a workload with its default, and no other; and its example is one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from measure.workload.spec import ArrivalsSpec, PrefixSpec, SessionStreamSpec, TraceSpec, WorkloadSpec, parse_workload

_DOC = (Path(__file__).parents[3] / "docs" / "loadtest.md").read_text(encoding="utf-8")
_WORKLOADS = _DOC.partition("## Workloads")[2].partition("\n## ")[0]
_ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| `([^`]*)` \| \S.*\|$", re.MULTILINE)


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", default(field)


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "null" if field.default is None else str(field.default)


def test_doc_lists_every_key_of_a_workload_with_its_default() -> None:
    expected = [
        *keys(WorkloadSpec),
        *keys(SessionStreamSpec, "streams."),
        *keys(ArrivalsSpec, "streams.arrivals."),
        *keys(PrefixSpec, "streams.prefix."),
        ("streams.trace", "null"),
        *keys(TraceSpec, "streams.trace."),
    ]
    assert dict(_ROW.findall(_WORKLOADS)) == dict(expected)


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", _WORKLOADS, re.DOTALL))
def test_example_of_the_doc_is_a_workload(block: str) -> None:
    assert len(parse_workload(yaml.safe_load(block), source="docs/loadtest.md").streams) == 3
