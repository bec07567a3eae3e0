"""The `kvrelay` command, and `python -m kvrelay` in a checkout that nothing installed.

The packages beside this one have plain names, such as `common` and `router`. Before any of them is imported, they must
be found where this one is: else another project's folder would run in their place.
"""

import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = (
    "cli",
    "cluster",
    "common",
    "decode_worker",
    "engine",
    "kv_transfer",
    "measure",
    "prefill_worker",
    "router",
    "worker",
)
"""Top-level packages of the distribution besides `kvrelay`."""


_HOME = Path(__file__).resolve().parents[1]
_DO = "install kvrelay into a virtual environment of its own, and leave PYTHONPATH alone"


class ForeignPackage(Exception):
    """Another project's package would be imported in place of one of ours."""


def check_packages(path: Sequence[str], home: Path = _HOME) -> None:
    """Raise ForeignPackage unless every package is found in `home` on an import path, and is the installed one.

    Imports none of them.
    """
    for name in PACKAGES:
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            raise ForeignPackage(f"cannot find the package `{name}` in {home}: install kvrelay again")
        found = Path(spec.origin).resolve()
        if found != home / name / "__init__.py":
            raise ForeignPackage(
                f"cannot start: another project's `{name}`, {found}, comes before that in {home}; {_DO}"
            )
    for file, digest in _installed(home):
        if _digest(file) != digest:
            raise ForeignPackage(f"cannot start: another project has replaced {file} by its own; {_DO}")


def _installed(home: Path) -> Iterator[tuple[Path, str]]:
    """Yield the packages' first files with their digests, as pip has recorded them; none in a checkout.

    A later installation of another project with such a package replaces them without a word.
    """
    for record in home.glob("kvrelay-*.dist-info/RECORD"):
        for line in record.read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition("/__init__.py,sha256=")
            if name in PACKAGES and rest:
                yield home / name / "__init__.py", rest.partition(",")[0]


def _digest(file: Path) -> str:
    """Return a file's digest as a RECORD has it."""
    return urlsafe_b64encode(sha256(file.read_bytes()).digest()).rstrip(b"=").decode()


def main() -> None:
    """Run the command line."""
    try:
        check_packages(sys.path)
    except ForeignPackage as error:
        sys.exit(f"kvrelay: {error}")
    from cli.main import main as run

    run()


if __name__ == "__main__":
    main()
