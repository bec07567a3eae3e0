"""The keeper of a Ray head, over a script that behaves like `ray start --block`."""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cluster.ray import keep_head
from cluster.ray.keep_head import RestartTiming, keep

_PACE = RestartTiming(poll_s=0.02, stopped_after_s=2.0, pause_s=0.0)
_HEAD = """
{folder}/gcs_server 600 & gcs=$!
{folder}/raylet 600 & raylet=$!
echo $gcs >>{folder}/pids
if [ -e {folder}/raylet_dies ]; then
  rm {folder}/raylet_dies
  trap "kill $gcs; exit 1" TERM
  sleep 2
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
does not come up and waits for its second one, which is dead."""


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


def gcs_pid(folder: Path) -> int:
    return int((folder / "pids").read_text(encoding="utf-8").split()[-1])


@contextmanager
def kept(folder: Path) -> Iterator[tuple[threading.Semaphore, list[int]]]:
    """Keep a head in a thread; yields a count of its lives, and a list for its exit status. It must end by itself."""
    command, ups, statuses = make_head(folder), threading.Semaphore(0), list[int]()
    log = folder / "head.log"
    keeper = threading.Thread(target=lambda: statuses.append(keep(command, log, on_up=ups.release, pace=_PACE)))
    keeper.start()
    assert ups.acquire(timeout=60)
    yield ups, statuses
    keeper.join(timeout=60)
    left = [child.name() for child in psutil.Process().children(recursive=True)]
    assert not {"sleep", "gcs_server", "raylet"} & set(left)


@pytest.mark.usefixtures("_no_ray_stop_of_other_tests")
def test_head_that_is_killed_is_started_again_and_one_that_ends_in_order_is_not(tmp_path: Path) -> None:
    with kept(tmp_path) as (ups, statuses):
        first = gcs_pid(tmp_path)
        os.kill(first, signal.SIGKILL)
        assert ups.acquire(timeout=60)
        second = gcs_pid(tmp_path)
        os.kill(second, signal.SIGTERM)

    assert (second != first, statuses) == (True, [0])


@pytest.mark.usefixtures("_no_ray_stop_of_other_tests")
def test_life_whose_raylet_dies_at_its_start_is_ended_and_another_one_begun(tmp_path: Path) -> None:
    with kept(tmp_path) as (ups, statuses):
        (tmp_path / "raylet_dies").touch()
        os.kill(gcs_pid(tmp_path), signal.SIGKILL)
        assert ups.acquire(timeout=60)
        assert len((tmp_path / "pids").read_text(encoding="utf-8").split()) == 3
        os.kill(gcs_pid(tmp_path), signal.SIGTERM)

    assert statuses == [0]


def test_head_that_ray_stop_has_killed_since_it_did_not_end_is_not_started_again(tmp_path: Path) -> None:
    with kept(tmp_path) as (ups, statuses), ray_stop(tmp_path):
        os.kill(gcs_pid(tmp_path), signal.SIGKILL)
        assert not ups.acquire(timeout=1.0)

    assert statuses == [0]


def test_head_that_does_not_come_up_is_not_tried_again(tmp_path: Path) -> None:
    def never() -> None:
        raise AssertionError("it was never up")

    on_up: Callable[[], None] = never

    assert keep(["bash", "-c", "echo port 6379 is taken; exit 3"], tmp_path / "log", on_up=on_up, pace=_PACE) == 3
    assert (tmp_path / "log").read_text(encoding="utf-8") == "port 6379 is taken\n"
