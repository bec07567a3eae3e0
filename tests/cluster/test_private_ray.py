"""The private Ray's session: no other user of the host gets at its sockets and logs."""

import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from cluster.ray.private_ray import PrivateRay


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return what Ray would have been started with; like Ray, it opens its folder to everybody."""
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        folder = Path(options["_temp_dir"])
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        calls.append(options)

    monkeypatch.setattr("cluster.ray.private_ray.ray.init", init)
    return calls


async def test_session_lies_in_a_new_folder_that_only_its_user_may_enter(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    first, second = PrivateRay("a"), PrivateRay("a")
    first.open()
    second.open()
    folders = [Path(options["_temp_dir"]).parent for options in started]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 2
    assert folders[0] != folders[1]
    await first.close()
    await second.close()
    assert not any(folder.exists() for folder in folders)


def test_session_where_others_may_rename_folders_is_refused(
    tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(PermissionError, match="other users may rename what is there; set RAY_TMPDIR"):
        PrivateRay("a").open()
    assert not started and not list(tmp_path.iterdir())


def test_session_whose_sockets_would_have_too_long_paths_says_what_to_set(
    tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 40)
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    with pytest.raises(OSError, match="set RAY_TMPDIR to a shorter folder"):
        PrivateRay("a").open()
    assert not started and not list(folder.iterdir())
