"""The wheel holds every file that a running cluster reads, and nothing else; its metadata says how to use it."""

import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from kvrelay.packages import PACKAGES

pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
from hatchling.builders.wheel import WheelBuilder

_REPO = Path(__file__).parents[2]
_CACHES = (".pyc", ".so")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(_REPO)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def test_every_file_of_the_packages_is_in_the_wheel_below_one_name_and_no_other(wheel: zipfile.ZipFile) -> None:
    ours = {"kvrelay.pth"} | {
        f"{'' if package == 'kvrelay' else 'kvrelay/_packages/'}{path.relative_to(_REPO).as_posix()}"
        for package in ("kvrelay", *PACKAGES)
        for path in (_REPO / package).rglob("*")
        if path.is_file() and not path.name.endswith(_CACHES)
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert sorted(packed ^ ours) == []
    within = {name.removeprefix("kvrelay/_packages/") for name in packed}
    assert {"kvrelay/py.typed", "engine/ops/cpu/kernels.cpp", "measure/pages/assets/page.js"} <= within


def test_wheel_runs_the_command_and_brings_its_licence(wheel: zipfile.ZipFile) -> None:
    files = {name.partition(".dist-info/")[2]: name for name in wheel.namelist()}
    assert "kvrelay = kvrelay.__main__:main" in wheel.read(files["entry_points.txt"]).decode()
    assert {"licenses/LICENSE", "licenses/NOTICE"} <= files.keys()


def test_metadata_names_the_extras_and_shows_the_readme(wheel: zipfile.ZipFile) -> None:
    told = metadata(wheel)
    assert set(told.get_all("Provides-Extra", [])) == {"ray", "fetch", "gguf", "otel", "vllm", "nixl"}
    assert told["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    assert str(told.get_payload()).startswith("# kvrelay")
    assert not [each for each in told.get_all("Requires-Dist", []) if "pytest" in each]
