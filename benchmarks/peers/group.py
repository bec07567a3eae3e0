"""A peer's processes: started in a group of their own, ended together."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """How to start an arm."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the benchmark's own environment."""


def start_group(spec: ArmSpec, *, log_path: Path, **streams: Any) -> subprocess.Popen[bytes]:
    """Start an arm's first process; standard error goes to `log_path`, and what `streams` says is Popen's.

    In a session of its own: an interrupt at the terminal reaches the benchmark alone, which then ends the whole group,
    the peer's own helpers included.
    """
    with log_path.open("wb") as log:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, **streams}
        return subprocess.Popen(
            list(spec.command),
            stderr=log,
            env={**os.environ, **spec.env},
            cwd=REPOSITORY,
            start_new_session=True,
            **options,
        )


def end_group(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """End a group that `start_group` began; what has not ended within `grace_s` is killed. Harmless when it is over.

    Helpers get their time too: Python's resource tracker takes semaphores away after all others have gone.
    """
    group = members(process.pid)
    _signal(process.pid, signal.SIGTERM)
    try:
        psutil.wait_procs(group, timeout=grace_s)
    finally:
        _signal(process.pid, signal.SIGKILL)  # whatever of the group is left, also behind a leader that has ended
        process.wait()


def members(pid: int) -> list[psutil.Process]:
    """Return the process and its descendants; empty when it is over."""
    try:
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process and its descendants have used so far."""
    total_s = 0.0
    for member in members(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total_s += times.user + times.system
    return total_s


def log_tail(log_path: Path) -> str:
    """Return the last lines of a log, indented, for an error message; empty when it cannot be read."""
    try:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join(f"    {line}" for line in lines[-8:])


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
