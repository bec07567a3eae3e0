"""docs/loadtest.md lists every key with its default, and no other; its examples are valid."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from measure.experiment.points import Source
from measure.experiment.prepare import Choices, prepare
from measure.experiment.spec import CapacitySpec, ExperimentSpec, ExternalSpec, Shape, SimulateSpec
from measure.workload.spec import (
    ArrivalsSpec,
    PrefixSpec,
    RecordedSpec,
    SessionStreamSpec,
    TraceSpec,
    WorkloadSpec,
    parse_workload,
)

_DOCS = Path(__file__).parents[2] / "docs"
_DOC = (_DOCS / "loadtest.md").read_text(encoding="utf-8")
_EXPERIMENTS, _WORKLOADS = (
    _DOC.partition(f"## {name}")[2].partition("\n## ")[0] for name in ("Experiments", "Workloads")
)
_ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| (?:`([^`]*)`|see below) \| \S.*\|$", re.MULTILINE)
_EXAMPLE = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
_TOLD_ELSEWHERE = ("slo", "capacity", "simulate")


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a section's keys with their defaults as the document writes them."""
    for name, field in section.model_fields.items():
        if f"{prefix}{name}" not in _TOLD_ELSEWHERE:
            yield f"{prefix}{name}", default(field)


def default(field: FieldInfo) -> str:
    """Return a default as YAML writes it."""
    if field.is_required():
        return "required"
    written = {None: "null", (): "[]", "": '""'}
    return "{}" if field.default == {} else written.get(field.default, str(field.default))


def test_doc_lists_every_key_of_an_experiment_with_its_default() -> None:
    expected = [
        *keys(ExperimentSpec),
        *keys(Shape, "shapes."),
        *keys(ExternalSpec, "external."),
        *keys(CapacitySpec, "capacity."),
        *keys(SimulateSpec, "simulate."),
    ]
    listed = {key: value for key, value in _ROW.findall(_EXPERIMENTS) if key not in _TOLD_ELSEWHERE}
    assert listed == dict(expected)


def test_doc_lists_every_key_of_a_workload_with_its_default() -> None:
    expected = [
        *keys(WorkloadSpec),
        *keys(SessionStreamSpec, "streams."),
        *keys(ArrivalsSpec, "streams.arrivals."),
        *keys(PrefixSpec, "streams.prefix."),
        ("streams.trace", "null"),
        *keys(TraceSpec, "streams.trace."),
        ("streams.sessions", "null"),
        ("streams.ramp_s", "0.0"),
        *keys(RecordedSpec, "streams.sessions."),
    ]
    assert dict(_ROW.findall(_WORKLOADS)) == dict(expected)


@pytest.mark.parametrize("name", ["planner", "waves", "tenants"])
def test_experiment_of_a_benchmark_can_run_with_its_trace_beside_it(name: str, tmp_path: Path) -> None:
    file, trace = f"{name}.yaml", _DOCS.parent / "tests" / "data" / "small.jsonl"
    text = (_DOCS.parent / "benchmarks" / "experiments" / file).read_text(encoding="utf-8")
    (tmp_path / file).write_text(text.replace("1364", "200"), encoding="utf-8")
    shutil.copyfile(trace, tmp_path / "mooncake_conversation.jsonl")
    assert prepare(tmp_path / file, Choices(source=Source.SIMULATED)).cells


@pytest.mark.parametrize("block", _EXAMPLE.findall(_EXPERIMENTS))
def test_example_in_the_doc_is_an_experiment(block: str) -> None:
    assert len(ExperimentSpec.model_validate(yaml.safe_load(block)).shapes) == 3


@pytest.mark.parametrize("block", _EXAMPLE.findall(_WORKLOADS))
def test_example_of_the_doc_is_a_workload(block: str) -> None:
    assert len(parse_workload(yaml.safe_load(block), source="docs/loadtest.md").streams) == 3


@pytest.mark.parametrize("path", sorted((_DOCS / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_file_can_be_run(path: Path) -> None:
    source = Source.SIMULATED if path.stem.startswith("simulated") else Source.REAL
    assert prepare(path, Choices(source=source)).cells
