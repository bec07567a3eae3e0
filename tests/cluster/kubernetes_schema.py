"""Kubernetes' own schema of the kinds that deploy/kubernetes uses, in tests/data/kubernetes_schema.json.

    pip install kubernetes-validate                      # some hundred megabytes: the schemas of all versions
    python -m tests.cluster.kubernetes_schema 1.37.0     # writes the file again

The file has the definitions that these kinds reach, without their descriptions. They allow no field that they do not
name, as the API server does with strict validation.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "kubernetes_schema.json"
CORE, POLICY = "io.k8s.api.core.v1", "io.k8s.api.policy.v1"
KINDS = (f"{CORE}.ConfigMap", f"{CORE}.Service", f"{CORE}.PodTemplateSpec", f"{POLICY}.PodDisruptionBudget")


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        schema = list(schema.values())
    for each in schema if isinstance(schema, list) else ():
        yield from _references(each)


def _without_texts(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_texts(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_text = {"description": str, "x-kubernetes-group-version-kind": list}
    return {
        key: _without_texts(value)
        for key, value in schema.items()
        if not isinstance(value, is_text.get(key, type(None)))
    }


def reached(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions that the kinds reach."""
    found: dict[str, Any] = {}
    names = list(KINDS)
    while names:
        name = names.pop()
        if name not in found:
            found[name] = _without_texts(definitions[name])
            names += _references(found[name])
    return dict(sorted(found.items()))


def main() -> None:
    """Write the file again."""
    (version,) = sys.argv[1:]
    package = importlib.util.find_spec("kubernetes_validate")
    if package is None or package.origin is None:
        raise SystemExit("cannot write the schema: its package is not installed; pip install kubernetes-validate")
    folder = Path(package.origin).parent / "kubernetes-json-schema" / f"v{version}-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
    lines = [
        f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}" for name, value in reached(definitions).items()
    ]
    FILE.write_text(f'{{"version":"{version}","$defs":{{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
