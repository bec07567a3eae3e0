"""Starts the head of a Ray cluster, and restarts it when it dies, until it is stopped on purpose.

    python -m cluster.ray.keep_head LOG ray start --head …

Returns when the head is up, or with status 1 if the first start fails, and stays in the background. Ray itself restarts
nothing: `ray start --block` ends the whole head when one of its processes is killed. The head is stopped on purpose if
`ray stop` ran when its processes died, or if all of them ended in order, in which case `ray start` does not return.
Does not import Ray.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

_UP = b"--block"
"""Ray prints this once everything runs."""
_MAIN_PROCESSES = frozenset({"gcs_server", "raylet"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartTiming:
    """Intervals and timeouts, in seconds."""

    poll_s: float = 0.25
    stopped_after_s: float = 5.0
    """A head that is incomplete for so long but has not ended was stopped. Ray checks every second. Before it is up,
    this is the time that it has for ending."""
    pause_s: float = 1.0
    """Pause before the next life."""


def keep(command: Sequence[str], log: Path, *, on_up: Callable[[], None], pace: RestartTiming | None = None) -> int:
    """Run a head again and again; `on_up` is called in each life. Returns 0 when it was stopped, else its exit status.

    A head that never came up is not started again.
    """
    pace = pace or RestartTiming()
    num_lives = 0
    while True:
        status, was_up = _live(command, log, on_up, pace)
        num_lives += was_up
        if status == 0 or num_lives == 0:
            return status
        time.sleep(pace.pause_s)


def _live(command: Sequence[str], log: Path, on_up: Callable[[], None], pace: RestartTiming) -> tuple[int, bool]:
    """Run one life. Returns its exit status, 0 if it was stopped, and whether it was up."""
    with log.open("ab") as output:
        offset = output.tell()
        process = subprocess.Popen(
            [*command, "--block"], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    was_up = is_stopped = False
    seen: set[str] = set()
    lonely_s = 0.0
    while process.poll() is None and lonely_s < pace.stopped_after_s:
        time.sleep(pace.poll_s)  # they are not our children, so there is no event
        if not was_up and _UP in _written(log, offset):
            was_up = True
            on_up()
        alive = _main_processes(process.pid)
        seen |= alive
        if alive >= (_MAIN_PROCESSES if was_up else seen):
            lonely_s = 0.0
            continue
        # On a busy host a raylet gives up when its agent takes 15 s to start; Ray would go on waiting for it for 30 s.
        if not was_up and lonely_s == 0.0:
            process.terminate()
        lonely_s += pace.poll_s
        is_stopped = is_stopped or _is_being_stopped()
    if process.poll() is None:
        process.kill()
        process.wait()
        return 0 if was_up or is_stopped else 1, was_up
    return 0 if is_stopped else process.returncode, was_up


def _main_processes(pid: int) -> frozenset[str]:
    """Return which of a head's main processes run below `ray start`."""
    try:
        children = psutil.Process(pid).children()
        return _MAIN_PROCESSES & {child.name() for child in children if child.status() != psutil.STATUS_ZOMBIE}
    except psutil.NoSuchProcess:
        return frozenset()


def _is_being_stopped() -> bool:
    """Return whether `ray stop` runs on this host. It runs until all processes of Ray have ended."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if any(Path(word).name == "ray" and then == "stop" for word, then in pairwise(words)):
            return True
    return False


def _written(log: Path, offset: int) -> bytes:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read()


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a head and leave its keeper in the background; see the module."""
    log_name, *command = arguments if arguments is not None else sys.argv[1:]
    log = Path(log_name).expanduser()
    reading, writing = os.pipe()
    if os.fork() != 0:
        os.close(writing)
        if os.read(reading, 1):
            return 0
        sys.stderr.write(f"Ray's head did not start; see {log}\n")
        return 1
    os.close(reading)
    os.setsid()
    with log.open("ab") as output:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)

    def report_once() -> None:
        nonlocal writing
        if writing >= 0:
            os.write(writing, b"1")
            os.close(writing)
            writing = -1

    os._exit(keep(command, log, on_up=report_once))


if __name__ == "__main__":
    sys.exit(main())
