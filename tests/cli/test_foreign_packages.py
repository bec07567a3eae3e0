"""Another project's package with a name of ours stops the command with a word, before any of it runs."""

import subprocess
import sys
import tomllib
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

import pytest

from kvrelay.__main__ import PACKAGES, ForeignPackage, check_packages

_REPO = Path(__file__).parents[2]


def installed(home: Path) -> Path:
    """Make a folder as pip leaves it: our packages, and the record of their files."""
    lines = []
    for name in PACKAGES:
        (home / name).mkdir(parents=True)
        text = f'"""Ours: {name}."""\n'
        (home / name / "__init__.py").write_text(text)
        digest = urlsafe_b64encode(sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name}/__init__.py,sha256={digest},{len(text)}\n")
    (home / "kvrelay-1.0.dist-info").mkdir()
    (home / "kvrelay-1.0.dist-info" / "RECORD").write_text("".join(lines))
    return home


def test_packages_as_they_were_installed_pass(tmp_path: Path) -> None:
    check_packages([str(installed(tmp_path))], tmp_path)


def test_packages_of_a_checkout_pass() -> None:
    check_packages([str(_REPO)])


@pytest.mark.parametrize("name", PACKAGES)
def test_package_that_comes_first_on_the_path_is_named(tmp_path: Path, name: str) -> None:
    home, other = installed(tmp_path / "site"), tmp_path / "other" / name
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    with pytest.raises(ForeignPackage, match=f"another project's `{name}`, {other}/__init__.py, .*virtual environment"):
        check_packages([str(other.parent), str(home)], home)


def test_package_that_a_later_installation_has_overwritten_is_named(tmp_path: Path) -> None:
    home = installed(tmp_path)
    (home / "common" / "__init__.py").write_text("import theirs\n")
    with pytest.raises(ForeignPackage, match=r"replaced .*common/__init__\.py"):
        check_packages([str(home)], home)


def test_package_that_was_removed_with_another_project_is_named(tmp_path: Path) -> None:
    home = installed(tmp_path)
    (home / "router" / "__init__.py").unlink()
    with pytest.raises(ForeignPackage, match="cannot find the package `router`"):
        check_packages([str(home)], home)


def test_command_ends_before_a_foreign_package_runs(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("print('theirs runs')\n")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvrelay", "--version"],
        env={"PYTHONPATH": f"{tmp_path}:{_REPO}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvrelay: cannot start: another project's `common`")


def test_every_package_of_the_distribution_is_checked() -> None:
    project = tomllib.loads((_REPO / "pyproject.toml").read_text(encoding="utf-8"))
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packed) == sorted([*PACKAGES, "kvrelay"])
