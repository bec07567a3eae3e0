"""The keeper of a Ray head, with a script that behaves like `ray start --block`."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from cluster.keep_head import Pace, keep

_PACE = Pace(poll_s=0.02, stopped_after_s=0.5, pause_s=0.0)
_HEAD = """
{gcs} 600 & gcs=$!
echo $gcs >>{pids}
echo told to --block
wait $gcs
[ $? -eq 143 ] && exec sleep 600
exit 1
"""
"""Ends with status 1 when its first process was killed, and never when that was stopped."""


def make_head(folder: Path) -> list[str]:
    """Write the script and return the command that runs it."""
    gcs = folder / "gcs_server"
    shutil.copy(shutil.which("sleep") or "", gcs)
    (folder / "head.sh").write_text(_HEAD.format(gcs=gcs, pids=folder / "pids"), encoding="utf-8")
    return ["bash", str(folder / "head.sh")]


def gcs_pid(folder: Path) -> int:
    return int((folder / "pids").read_text(encoding="utf-8").split()[-1])


def test_head_that_is_killed_is_started_again_and_one_that_is_stopped_is_not(tmp_path: Path) -> None:
    command, ups, statuses = make_head(tmp_path), threading.Semaphore(0), list[int]()
    log = tmp_path / "head.log"
    keeper = threading.Thread(target=lambda: statuses.append(keep(command, log, on_up=ups.release, pace=_PACE)))
    keeper.start()
    assert ups.acquire(timeout=60)
    first = gcs_pid(tmp_path)

    os.kill(first, signal.SIGKILL)
    assert ups.acquire(timeout=60)
    second = gcs_pid(tmp_path)
    os.kill(second, signal.SIGTERM)
    keeper.join(timeout=60)

    assert (second != first, statuses) == (True, [0])
    assert not [child for child in psutil.Process().children(recursive=True) if child.name() in ("sleep", "gcs_server")]


def test_head_that_does_not_come_up_is_not_tried_again(tmp_path: Path) -> None:
    def never() -> None:
        raise AssertionError("it was never up")

    on_up: Callable[[], None] = never

    assert keep(["bash", "-c", "echo port 6379 is taken; exit 3"], tmp_path / "log", on_up=on_up, pace=_PACE) == 3
    assert (tmp_path / "log").read_text(encoding="utf-8") == "port 6379 is taken\n"
