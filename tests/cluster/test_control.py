"""The control socket of a supervisor, wherever the run folder is."""

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest

from cluster.changes.change import Changes
from cluster.control import SupervisorAway, read_changes, socket_path, stop
from cluster.control_service import Controls, serving_control

UNUSED: Any = None


@pytest.mark.parametrize(
    "name", ["short", pytest.param("scratch/" * 30, id="longer than a socket's path"), "with space, % 41 # and ü?"]
)
async def test_cluster_is_controlled_in_any_run_folder(tmp_path: Path, name: str) -> None:
    run_dir, stopping = tmp_path / name, asyncio.Event()
    run_dir.mkdir(parents=True)
    changes = Changes()
    controls = Controls(scaler=UNUSED, rollouts=UNUSED, planning=UNUSED, changes=changes, stop=stopping.set)
    async with serving_control(controls, run_dir):
        assert stat.S_IMODE(socket_path(run_dir).stat().st_mode) == 0o600
        assert not (await asyncio.to_thread(read_changes, run_dir)).changes
        await asyncio.to_thread(stop, run_dir)
    assert stopping.is_set()
    assert not socket_path(run_dir).exists()


def test_supervisor_of_a_deleted_run_folder_is_away(tmp_path: Path) -> None:
    with pytest.raises(SupervisorAway, match="is gone"):
        stop(tmp_path / "deleted")
