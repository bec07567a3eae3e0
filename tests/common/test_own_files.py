"""Files that are loaded later: nobody else may change them, and a crash leaves none cut."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.own_files import is_own, own_folder, publish

_SOMEBODY_ELSE = 65534
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("no_umask")
def test_folder_that_a_loose_umask_left_open_is_closed_to_others(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "kernels").mkdir(parents=True)
    assert mode(cache) == mode(cache / "kernels") == 0o777

    own_folder(cache / "kernels")
    own_folder(cache / "more")

    assert mode(cache) == mode(cache / "kernels") == 0o755
    assert mode(cache / "more") == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o755)
    os.chown(folder, _SOMEBODY_ELSE, _SOMEBODY_ELSE)
    with pytest.raises(PermissionError, match=f"another user may write there; remove the folder: '{folder}'"):
        own_folder(folder)


def test_file_is_own_unless_others_may_write_it_and_a_sticky_folder_is(tmp_path: Path) -> None:
    for allowed, permissions in ((True, 0o755), (False, 0o775), (False, 0o757), (True, 0o1777)):
        tmp_path.chmod(permissions)
        assert is_own(tmp_path) is allowed, oct(permissions)


def test_what_is_published_reaches_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, target = tmp_path / "scratch", tmp_path / "model"
    (made / "folder").mkdir(parents=True)
    (made / "folder" / "weights").write_bytes(b"x")
    synced: list[Path] = []

    def fsync(fd: int) -> None:
        assert target.exists() is (len(synced) == 3), "the name comes after its content, and then reaches the disk too"
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())

    monkeypatch.setattr(os, "fsync", fsync)
    publish(made, target)
    assert set(synced[:3]) == {made, made / "folder", made / "folder" / "weights"}
    assert synced[3:] == [tmp_path]
    assert (target / "folder" / "weights").read_bytes() == b"x"


def test_command_writes_nothing_for_others_to_change_whatever_the_umask(tmp_path: Path) -> None:
    program = "import os, sys; os.umask(0); from kvrelay.__main__ import main; sys.argv = ['kvrelay', '--help']\n"
    program += "try: main()\nexcept SystemExit: pass\nopen('made', 'w')"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=_ENVIRONMENT, capture_output=True, check=True)
    assert mode(tmp_path / "made") == 0o644
