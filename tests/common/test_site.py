"""The documents' site has every page, links that lead somewhere, and names of ours that exist."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from common.config import ServingConfig, TenantConfig

_REPO = Path(__file__).parents[2]
_SITE = _REPO / "deploy" / "site"
_SOURCE: dict[str, Any] = runpy.run_path(str(_SITE / "source.py"))
_KEY = re.compile(r"`((?:model|pools|router|transfer|tls|slo|planner|tracing|tenants)\.[\w.*]+)")


def navigation(entries: list[Any]) -> list[str]:
    """Return the files of a site's navigation."""
    found: list[str] = []
    for entry in entries:
        (value,) = entry.values()
        found += navigation(value) if isinstance(value, list) else [value]
    return found


def test_navigation_names_every_page_once() -> None:
    text = (_SITE / "mkdocs.yml").read_text(encoding="utf-8")
    listed = navigation(yaml.safe_load(text.partition("\nnav:\n")[2]))
    assert sorted(listed) == sorted(str(page) for page in _SOURCE["pages"](_REPO))


def test_every_link_between_documents_leads_to_a_file() -> None:
    assert _SOURCE["missing_links"](_REPO) == {}


def test_link_to_a_missing_file_stops_the_site(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[a](docs/a.md) and `[b](b.md)` and [c](https://c.example/c)")
    with pytest.raises(FileNotFoundError, match=r"README.md links to docs/a\.md"):
        _SOURCE["stage"](tmp_path / "out", {}, tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("[up](../README.md), ![picture](a.svg)")
    (tmp_path / "docs" / "a.svg").touch()
    assert _SOURCE["stage"](tmp_path / "out", {}, tmp_path) == 2
    assert (tmp_path / "out" / "docs" / "a.svg").exists()


def keys_of(kind: type[BaseModel], prefix: str) -> set[str]:
    """Return the dotted keys of a part of the configuration."""
    found = set()
    for name, field in kind.model_fields.items():
        found.add(f"{prefix}{name}")
        if isinstance(field.default, BaseModel):
            found |= keys_of(type(field.default), f"{prefix}{name}.")
    return found


def unknown_names(text: str) -> list[str]:
    """Return what a page says of our configuration and metrics and does not exist."""
    known = keys_of(ServingConfig, "") | keys_of(TenantConfig, "tenants.")
    known |= {key.replace(f"pools.{pool}.", "pools.*.") for key in known for pool in ("prefill", "decode")}
    metrics = set(re.findall(r"^\| `(kvrelay_\w+)`", (_REPO / "docs" / "metrics.md").read_text("utf-8"), re.MULTILINE))
    asked = [key.rstrip(".") for key in _KEY.findall(text)]
    return [key for key in asked if key not in known] + sorted(set(re.findall(r"kvrelay_\w+", text)) - metrics)


def test_names_on_our_side_of_the_comparison_exist() -> None:
    text = (_REPO / "docs" / "coming-from.md").read_text(encoding="utf-8")
    assert unknown_names(text) == []
    assert unknown_names("`router.polcy: x`, `pools.*.size` and `kvrelay_ttft`") == [
        "router.polcy",
        "pools.*.size",
        "kvrelay_ttft",
    ]
