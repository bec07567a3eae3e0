"""docs/: words are defined once, numbers that are configured, exported or reported have a unit, paths exist."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel

from common.config import PoolConfig, ServingConfig, TenantConfig
from common.config.tables import meanings_of

_REPO = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (.+?) \|(.*)\|$", re.MULTILINE)
_METRIC = re.compile(r'"(kvrelay_[a-z0-9_]+)"')
_NAMED = re.compile(
    r"_(s|ms|seconds|bytes|mib|gib|tokens|blocks|cpus|gpus|workers|port|per_min|ratio)(_total)?$|(/s| %| GB| µs)$"
)
_QUANTITY = re.compile(
    r"\b(milliseconds|seconds|time|bytes|tokens?|share|pages|blocks|ports?|priority|TTFT|1 while)\b| / ", re.IGNORECASE
)
_COUNTED = re.compile(
    r"\b(workers|routers|requests|sequences|reservations|calls|connections|bookings|handoffs|pulls|plans|changes|cpus|gpus"
    r"|refusals|threads|ranks|alarms)\b",
    re.IGNORECASE,
)
_IN_BACKTICKS = re.compile(r"`([\w.*-]+(?:/[\w.*-]+)*/?)`")
_MADE_FOLDERS = ("tls/", "dist/")
"""Folders that a running cluster or a release makes."""
_TIMES = {"TTFT", "ITL", "TPOT", "E2E", "queue", "prefill", "transfer", "exposed", "lag"}


def read(name: str) -> str:
    return (_REPO / "docs" / name).read_text(encoding="utf-8")


def rows(text: str) -> list[tuple[str, str]]:
    return [(head, rest) for head, rest in _ROW.findall(text) if not set(head) <= set("-|")]


def section(text: str, heading: str) -> str:
    return text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]


def terms(glossary: str) -> list[str]:
    """Return the words that a glossary defines: the first cells of its rows, and what is bold in the others."""
    defined = [term for head, _ in rows(glossary) for term in re.findall(r"[*`]+([^*`]+)[*`]+", head)]
    return defined + [term for _, rest in rows(glossary) for term in re.findall(r"\*\*(.+?)\*\*", rest)]


def test_glossary_defines_every_word_once() -> None:
    found = terms(read("glossary.md"))

    assert len(found) > 100
    assert sorted({term for term in found if found.count(term) > 1}) == []


def test_every_exported_metric_is_documented_with_its_unit() -> None:
    documented = {
        head.strip("`"): rest for head, rest in rows(read("metrics.md")) if re.fullmatch(r"`kvrelay_\w+`", head)
    }
    exported = {
        name
        for package in ("router", "worker", "cluster")
        for path in (_REPO / package).rglob("*.py")
        for name in _METRIC.findall(path.read_text(encoding="utf-8"))
    }

    assert len(exported) > 40
    assert sorted(name for name in exported if not {name, f"{name}_total"} & set(documented)) == []
    assert [name for name, meaning in documented.items() if not has_unit(name, meaning)] == []


def test_every_number_of_the_configuration_has_a_unit() -> None:
    sections: list[type[BaseModel]] = [PoolConfig, TenantConfig]
    sections += [
        type(each.default) for each in ServingConfig.model_fields.values() if isinstance(each.default, BaseModel)
    ]
    numbers = {
        f"{kind.__name__}.{key}": meanings_of(kind)[key]
        for kind in sections
        for key, field in kind.model_fields.items()
        if re.search(r"\b(int|float)\b", str(field.annotation))
    }

    assert len(numbers) > 40
    assert [key for key, meaning in numbers.items() if not has_unit(key, meaning)] == []


@pytest.mark.parametrize(
    ("document", "heading"), [("simulation.md", "## Results"), ("loadtest.md", "## Reading the numbers")]
)
def test_every_reported_column_has_a_unit(document: str, heading: str) -> None:
    columns = [(re.sub(r"[*`]", "", head).split(", "), rest) for head, rest in rows(section(read(document), heading))]

    assert len(columns) > 5
    for names, meaning in columns[1:]:
        assert all(name in _TIMES or has_unit(name, meaning.split(" | ")[0], counted=False) for name in names), names


def has_unit(name: str, meaning: str, *, counted: bool = True) -> bool:
    """Return whether a number's name or its documentation says what one of it is."""
    says = _QUANTITY.search(meaning) or (counted and _COUNTED.search(f"{name.replace('_', ' ')} {meaning}"))
    return bool(_NAMED.search(name) or says)


def repository_paths() -> list[Path]:
    roots = [each for each in _REPO.iterdir() if each.name == ".ci" or not each.name.startswith(".")]
    return [path.relative_to(_REPO) for root in roots for path in (root, *root.rglob("*"))]


def missing_paths(text: str, existing: Sequence[Path]) -> list[str]:
    """Return the paths in backticks that end no existing path; names in capitals stand for output of a command."""
    named = [
        each
        for each in _IN_BACKTICKS.findall(text)
        if ("/" in each or each.endswith((".py", ".h", ".cpp", ".proto")))
        and not each.startswith(_MADE_FOLDERS)
        and not any(part.partition(".")[0].isupper() for part in each.split("/"))
    ]
    return [each for each in named if not any(path.match(each) for path in existing)]


def test_every_repository_path_in_the_documents_exists() -> None:
    existing = repository_paths()
    documents = {str(path): (_REPO / path).read_text("utf-8") for path in existing if path.suffix == ".md"}

    assert {name: found for name, text in documents.items() if (found := missing_paths(text, existing))} == {}
