"""Ranks that are forked from a process that has imported torch, which costs each rank more than what tests compute.

For tests of what ranks compute. How ranks start and end is tested with the programs that workers start.
"""

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.reduction import DupFd
from typing import Any

from common.process import PARENT_PID_ENV, die_with_parent

_CONTEXT = multiprocessing.get_context("forkserver")
_PROGRAMS = ["engine.ranks.follower", "engine.cuda.follower"]


class ForkedRank:
    """Stands in for the `subprocess.Popen` of `engine.ranks.__main__`, with the methods that the first rank calls."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: object) -> None:
        program = command[-1 - len(pass_fds)]
        _CONTEXT.set_forkserver_preload(_PROGRAMS)  # its server starts with the first rank
        given = (program, {**env}, *map(_Descriptor, pass_fds))
        self._process = _CONTEXT.Process(target=_main, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """See `subprocess.Popen`."""
        self._process.kill()


class _Descriptor:
    """A descriptor that the new process gets, under another number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return DupFd(self.fd)

    def __setstate__(self, given: Any) -> None:
        self.fd = given.detach()


def _main(program: str, environment: Mapping[str, str], *descriptors: _Descriptor) -> None:
    os.environ.clear()
    os.environ.update(environment, **{PARENT_PID_ENV: str(os.getppid())})
    die_with_parent()  # the server, which ends with the tests
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    import_module(program).main(*(each.fd for each in descriptors))
