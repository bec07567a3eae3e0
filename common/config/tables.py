"""Writes the tables of configuration keys into documents, from the declarations of the sections.

    python -m common.config.tables docs/serving.md docs/changes.md docs/engines.md

A table stands under a line `<!-- table: NAME -->`. NAME is a section, `serving` for the top level, `needs` for the
words in the column "change", `rollout` for all keys by what a change of them needs, or `engines` for what each can.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from common.config.keys import Need, in_yaml
from common.config.router import TenantConfig
from common.config.serving import NEEDS, ServingConfig
from common.config.workers import PoolConfig, SpeculationConfig
from common.engines import ENGINES, FEATURES, Capabilities

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(?:\|.*\n)*")


def write_tables(text: str) -> str:
    """Return a document with its tables written anew. Raises KeyError for a table that does not exist."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2]), text)


def _table(name: str) -> str:
    rows: list[tuple[str, ...]]
    match name:
        case "needs":
            shown = (need for need in Need if need not in (Need.PREFILL, Need.DECODE))
            rows = [("change", "needs"), *((f"`{need.name.lower()}`", need.value) for need in shown)]
        case "engines":
            rows = [("", *(f"`{engine}`" for engine in ENGINES)), *_features()]
        case "rollout":
            rows = [("a change of", "needs"), *_keys_by_need()]
        case _:
            rows = [("key", "default", "change", "meaning"), *_key_rows(name)]
    head, *body = (f"| {' | '.join(row)} |\n" for row in rows)
    return "".join([head, "|" + "---|" * len(rows[0]) + "\n", *body])


def _features() -> Iterator[tuple[str, ...]]:
    meanings = meanings_of(Capabilities)
    for feature in FEATURES:
        yield meanings[feature], *(getattr(can, feature) for can in ENGINES.values())


def _key_rows(name: str) -> Iterator[tuple[str, ...]]:
    section: type[BaseModel]
    match name:
        case "serving":
            section, prefix = ServingConfig, ""
        case "pools":
            section, prefix = PoolConfig, ""
        case "speculation":
            section, prefix = SpeculationConfig, "model.speculation."
        case "tenants":
            section, prefix = TenantConfig, "tenants."
        case _:
            section, prefix = type(ServingConfig.model_fields[name].default), f"{name}."
    meanings = meanings_of(section)
    for key, field in section.model_fields.items():
        if isinstance(field.default, BaseModel):
            continue
        need = next((each for each in field.metadata if isinstance(each, Need)), NEEDS["tenants"])
        default = "required" if field.is_required() else in_yaml(field.get_default(call_default_factory=True))
        yield f"`{prefix}{key}`", f"`{default}`", f"`{need.name.lower()}`", meanings[key]


def meanings_of(section: type) -> Mapping[str, str]:
    """Return the docstring of each key of a section, as one line. Reads the source: pydantic would at every start."""
    (declaration,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(declaration, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, below in pairwise(declaration.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                found[key] = " ".join(text.split())
    return found


def _keys_by_need() -> Iterator[tuple[str, str]]:
    sections: dict[str, dict[str, Need]] = {}
    for key, need in NEEDS.items():
        sections.setdefault(key.rpartition(".")[0], {})[key] = need
    for need in Need:
        shown: list[str] = []
        for section, needs in sections.items():
            keys = [f"`{key}`" for key, own in needs.items() if own is need]
            if section and len(keys) == len(needs):
                shown.append(f"`{section}.*`")
            elif section and 2 * len(keys) > len(needs):
                shown.append(f"other keys of `{section}`")
            else:
                shown += keys
        if shown:
            yield ", ".join(shown), need.value


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(write_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
