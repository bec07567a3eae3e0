"""An installation claims one name; another project's package with a name of ours changes neither project."""

import os
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from kvrelay.packages import PACKAGES, ForeignPackage, check_packages, home_of

_REPO = Path(__file__).parents[2]


def packed(folder: Path) -> Path:
    """Make packages as a wheel brings them; returns their home."""
    for name in PACKAGES:
        (folder / "kvrelay" / "_packages" / name).mkdir(parents=True)
        (folder / "kvrelay" / "_packages" / name / "__init__.py").touch()
    return home_of(folder / "kvrelay")


def run(python: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-P", *arguments]
    return subprocess.run(command, env={"PATH": "", **environ}, capture_output=True, text=True, timeout=120)


def test_packages_as_they_were_installed_pass(tmp_path: Path) -> None:
    home = packed(tmp_path)
    assert home == tmp_path / "kvrelay" / "_packages"
    check_packages([str(home)], home)


def test_packages_of_a_checkout_pass() -> None:
    assert home_of() == _REPO
    check_packages([str(_REPO)])


@pytest.mark.parametrize("name", PACKAGES)
def test_package_that_comes_first_on_the_path_is_named(tmp_path: Path, name: str) -> None:
    home, other = packed(tmp_path / "site"), tmp_path / "other" / name
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    with pytest.raises(ForeignPackage, match=f"another project's `{name}`, {other}/__init__.py, .*virtual environment"):
        check_packages([str(other.parent), str(home)], home)


def test_package_that_was_removed_is_named(tmp_path: Path) -> None:
    home = packed(tmp_path)
    (home / "router" / "__init__.py").unlink()
    with pytest.raises(ForeignPackage, match="cannot find the package `router`"):
        check_packages([str(home)], home)


def test_command_of_a_checkout_ends_before_a_foreign_package_runs(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("print('theirs runs')\n")
    done = run(Path(sys.executable), "-m", "kvrelay", "--version", PYTHONPATH=f"{tmp_path}:{_REPO}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvrelay: cannot start: another project's `common`")


def test_every_package_of_the_distribution_is_packed_below_one_name() -> None:
    wheel = tomllib.loads((_REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert sorted(wheel["wheel"]["packages"]) == sorted([*PACKAGES, "kvrelay"])
    assert wheel["wheel"]["sources"] == {name: f"kvrelay/_packages/{name}" for name in PACKAGES}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose site-packages hold kvrelay's wheel and another project's `common` and `router`."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling, which builds the wheel, is missing")
    folder = tmp_path_factory.mktemp("shared")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (wheel,) = builder.WheelBuilder(str(_REPO)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as files:
        files.extractall(packages)
    # What kvrelay requires; a path file in these folders, such as that of an editable kvrelay, has no effect here.
    needed = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]
    (packages / "zz-requirements.pth").write_text("\n".join(needed))
    for name in ("common", "router"):
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text("OWNER = 'theirs'\n")
    return folder / "bin" / "python"


def test_wheel_beside_a_project_with_the_same_names_runs_its_own_packages(shared: Path, tmp_path: Path) -> None:
    done = run(shared, "-m", "kvrelay", "--version", HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")

    child = (
        "import os, subprocess, sys; subprocess.run([sys.executable, '-P', '-c', 'import router.tenants'], check=True)"
    )
    put_first = "from kvrelay.packages import *; from kvrelay import packages as p; p.put_first(p.home_of()); "
    assert run(shared, "-c", put_first + child).stderr == ""


def test_other_project_beside_the_wheel_keeps_its_own_packages(shared: Path) -> None:
    asked = "import common, router; print(common.OWNER, router.OWNER)"
    assert run(shared, "-c", asked).stdout == "theirs theirs\n"
    # Names that no other project has are found by the path file, as Ray's processes need it.
    found = run(shared, "-c", "import decode_worker; print(decode_worker.__file__)").stdout
    assert f"{os.sep}_packages{os.sep}" in found


def test_client_beside_a_project_with_the_same_names_says_so(shared: Path) -> None:
    done = run(shared, "-c", "import kvrelay.client")
    assert "ForeignPackage: cannot start: another project's `common`" in done.stderr
