"""The interface of a launcher: subprocesses (`launch_local`) or Ray actors (`cluster.ray.launch_ray`)."""

from typing import Protocol

from cluster.processes.plan import ProcessRole, ProcessSpec
from common.process import CannotStart, ProcessIdentity, Ready
from common.trust.identity import Role


class StartFailed(Exception):
    """A process or the launcher itself did not come up; the message gives the reason, or the end of the log."""

    def __init__(self, reason: str, *, key: str = "") -> None:
        """`key`: the key of serving.yaml that asks for what cannot be had, if there is one."""
        super().__init__(reason)
        self.key = key

    @classmethod
    def explained(cls, name: str, failure: CannotStart) -> "StartFailed":
        """Return what a process of this name has found itself."""
        return cls(f"{name}: {failure}", key=failure.key)


def identity_role(role: ProcessRole) -> Role:
    """Return the identity role under which a process of the plan is certified."""
    return Role.ROUTER if role is ProcessRole.ROUTER else Role.WORKER


class RunningProcess(Protocol):
    """A process that has served, alive or dead."""

    @property
    def ready(self) -> Ready:
        """Its ready line: where it serves."""
        ...

    @property
    def identity(self) -> ProcessIdentity | None:
        """Its operating system process; None on another host."""
        ...

    async def exited(self) -> str:
        """Wait until it is dead and return how it died; kills it when it no longer answers. Several tasks may wait."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Let it drain for up to `grace_s` seconds, then kill it. Returns when it is gone; may be repeated."""
        ...


class Launcher(Protocol):
    """Starts processes."""

    async def open(self) -> None:
        """Acquire the resources that all processes share. Raises StartFailed."""
        ...

    def found(self) -> frozenset[str]:
        """Return the names of processes that an earlier supervisor left; `start` takes these over as they are."""
        ...

    def missing_room_of(self, spec: ProcessSpec) -> str:
        """Return the room that a starting process waits for, beside what is free; empty if it has room."""
        ...

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a process, or start it again, and return it when it serves.

        Raises StartFailed if it dies before that. Leaves no process behind when cancelled.
        """
        ...

    async def close(self) -> None:
        """Release the shared resources, after every process was stopped. Harmless if `open` failed."""
        ...
