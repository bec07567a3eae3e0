"""What the supervisor needs from whatever runs the processes: plain subprocesses or Ray."""

from pathlib import Path
from typing import Protocol

from cluster.processes.plan import ProcessRole, ProcessSpec
from common.process import ProcessIdentity, Ready
from common.trust.identity import Role


class StartFailed(Exception):
    """A process, or what runs processes, did not come up; the message says why, with the end of its log."""


def identity_role(role: ProcessRole) -> Role:
    """Return as what a process of the plan is known to others."""
    return Role.ROUTER if role is ProcessRole.ROUTER else Role.WORKER


class RunningProcess(Protocol):
    """A process that serves, or did until it died."""

    @property
    def ready(self) -> Ready:
        """Where it serves."""
        ...

    @property
    def identity(self) -> ProcessIdentity | None:
        """Which process it is; None on another host."""
        ...

    async def exited(self) -> str:
        """Wait until it is dead and return how it died. Several may wait."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Let it drain for up to `grace_s` seconds, then kill it. Returns when it is gone; harmless when it is."""
        ...


class Launcher(Protocol):
    """Starts processes."""

    async def open(self) -> None:
        """Acquire what all processes share. Raises StartFailed."""
        ...

    def found(self) -> frozenset[str]:
        """Return the names of processes that an earlier supervisor has left, which `start` takes as they are."""
        ...

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a process, again after it died, and return it when it serves.

        Raises StartFailed when it dies before. Cancelled meanwhile, it leaves no process behind.
        """
        ...

    async def close(self) -> None:
        """Release what `open` acquired, after every process was stopped. Harmless when `open` failed."""
        ...


def log_path(run_dir: Path, process_name: str) -> Path:
    """Return the log file of a process; all its lives append to it."""
    return run_dir / "logs" / f"{process_name}.log"


def log_tail(path: Path, *, offset: int = 0, num_lines: int = 15) -> str:
    """Return the last lines that were written to a log after byte `offset`; empty when there is no log."""
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            begin = offset if offset <= num_bytes else 0  # it is a new file
            file.seek(max(begin, num_bytes - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])
