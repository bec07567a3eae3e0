"""The keeper of a Ray head, over a script that behaves like `ray start --block`."""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import pytest

from cluster.ray import keep_head
from cluster.ray.keep_head import RestartTiming, keep

_HEAD = """
{folder}/gcs_server 600 & gcs=$!
{folder}/raylet 600 & raylet=$!
echo $gcs >>{folder}/pids
if [ -e {folder}/raylet_dies ]; then
  rm {folder}/raylet_dies
  trap "kill $gcs; exit 1" TERM
  until [ -e {folder}/raylet_may_die ]; do sleep 0.05; done
  kill $raylet
  wait $gcs
fi
echo told to --block
wait $gcs
status=$?
kill $raylet
[ $status -eq 143 ] && exec sleep 600
sleep 0.5
exit 1
"""
"""Ends with status 1 after its first process was killed, and never if that ended in order. With a file `raylet_dies` it
does not come up and waits for its second one, which is dead once there is a file `raylet_may_die`."""


@dataclass
class Pace:
    """Stands for `RestartTiming`: a head has all the time that it needs to end, until the test ends one in order."""

    poll_s: float = 0.02
    stopped_after_s: float = 60.0
    pause_s: float = 0.0


class Kept:
    """A head that is kept in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ups = threading.Semaphore(0)
        """Counts its lives."""
        self.statuses: list[int] = []
        self.keeper = threading.Thread(target=self._run)
        self._pace = Pace()

    def gcs_pids(self) -> list[int]:
        """Return the first process of every life."""
        return list(map(int, (self.folder / "pids").read_text(encoding="utf-8").split()))

    def kill(self) -> None:
        os.kill(self.gcs_pids()[-1], signal.SIGKILL)

    def end_in_order(self) -> None:
        self._pace.stopped_after_s = 2.0
        os.kill(self.gcs_pids()[-1], signal.SIGTERM)

    def _run(self) -> None:
        command, pace = make_head(self.folder), cast("RestartTiming", self._pace)
        self.statuses.append(keep(command, self.folder / "head.log", on_up=self.ups.release, pace=pace))


def make_head(folder: Path) -> list[str]:
    """Write the script and return the command that runs it."""
    for name in ("gcs_server", "raylet"):
        shutil.copy(shutil.which("sleep") or "", folder / name)
    (folder / "head.sh").write_text(_HEAD.format(folder=folder), encoding="utf-8")
    return ["bash", str(folder / "head.sh")]


@pytest.fixture
def _no_ray_stop_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_head, "_is_being_stopped", lambda: False)


@contextmanager
def ray_stop(folder: Path) -> Iterator[None]:
    """Run a process with the name of `ray stop`."""
    script = folder / "ray"
    script.write_text("echo; read -r _", encoding="utf-8")
    with subprocess.Popen(["bash", str(script), "stop"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate(b"\n")


@contextmanager
def kept(folder: Path) -> Iterator[Kept]:
    """Keep a head, which is up inside the block. It must end by itself."""
    head = Kept(folder)
    head.keeper.start()
    assert head.ups.acquire(timeout=60)
    yield head
    head.keeper.join(timeout=60)
    left = [child.name() for child in psutil.Process().children(recursive=True)]
    assert not {"sleep", "gcs_server", "raylet"} & set(left)


@pytest.mark.usefixtures("_no_ray_stop_of_other_tests")
def test_head_that_is_killed_is_started_again_and_one_that_ends_in_order_is_not(tmp_path: Path) -> None:
    with kept(tmp_path) as head:
        head.kill()
        assert head.ups.acquire(timeout=60)
        head.end_in_order()

    first, second = head.gcs_pids()
    assert (second != first, head.statuses) == (True, [0])


@pytest.mark.usefixtures("_no_ray_stop_of_other_tests")
def test_life_whose_raylet_dies_at_its_start_is_ended_and_another_one_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = keep_head._main_processes  # noqa: SLF001 - a raylet that was never seen is not missed

    def let_it_die_once_seen(pid: int) -> frozenset[str]:
        alive = look(pid)
        if len(alive) == 2 and len(head.gcs_pids()) == 2:
            (tmp_path / "raylet_may_die").touch()
        return alive

    with kept(tmp_path) as head:
        monkeypatch.setattr(keep_head, "_main_processes", let_it_die_once_seen)
        (tmp_path / "raylet_dies").touch()
        head.kill()
        assert head.ups.acquire(timeout=60)
        assert len(head.gcs_pids()) == 3
        head.end_in_order()

    assert head.statuses == [0]


def test_head_that_ray_stop_has_killed_since_it_did_not_end_is_not_started_again(tmp_path: Path) -> None:
    with kept(tmp_path) as head, ray_stop(tmp_path):
        head.kill()
        head.keeper.join(timeout=60)

    assert head.statuses == [0]
    assert not head.ups.acquire(blocking=False)


def test_head_that_does_not_come_up_is_not_tried_again(tmp_path: Path) -> None:
    def never() -> None:
        raise AssertionError("it was never up")

    on_up: Callable[[], None] = never
    pace = RestartTiming(poll_s=0.02, pause_s=0.0)

    assert keep(["bash", "-c", "echo port 6379 is taken; exit 3"], tmp_path / "log", on_up=on_up, pace=pace) == 3
    assert (tmp_path / "log").read_text(encoding="utf-8") == "port 6379 is taken\n"
