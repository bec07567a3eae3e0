"""Finds the packages beside this one, which have plain names such as `common` and `router`.

In a checkout they lie beside `kvrelay`; a wheel holds them in `kvrelay/_packages`, so that an installation claims one
name. Before any of them is imported, they must be found there: else another project's folder would run in their place.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = (
    "cli",
    "cluster",
    "common",
    "decode_worker",
    "engine",
    "kv_tiers",
    "kv_transfer",
    "measure",
    "prefill_worker",
    "router",
    "worker",
)
"""Packages of the distribution besides `kvrelay`."""

_KVRELAY = Path(__file__).resolve().parent
_DO = "install kvrelay into a virtual environment of its own, and leave PYTHONPATH alone"


class ForeignPackage(ImportError):
    """Another project's package would be imported in place of one of ours."""


def home_of(kvrelay: Path = _KVRELAY) -> Path:
    """Return the folder of the packages that belong to the package `kvrelay` in a folder."""
    packed = kvrelay / "_packages"
    return packed if packed.is_dir() else kvrelay.parent


def put_first(home: Path) -> None:
    """Let this process and its children find packages in `home` before all others, unless it is a checkout."""
    if home.name != "_packages":
        return
    sys.path.insert(0, str(home))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(home), *([inherited] if inherited else [])])


def check_packages(path: Sequence[str], home: Path | None = None, names: Sequence[str] = PACKAGES) -> None:
    """Raise ForeignPackage unless every package is found in its home on an import path. Imports none of them."""
    home = home_of() if home is None else home
    for name in names:
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            raise ForeignPackage(f"cannot find the package `{name}` in {home}: install kvrelay again")
        found = Path(spec.origin).resolve()
        if found != home / name / "__init__.py":
            raise ForeignPackage(
                f"cannot start: another project's `{name}`, {found}, comes before that in {home}; {_DO}"
            )
