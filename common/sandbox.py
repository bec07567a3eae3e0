"""Work that may take too much time or memory, or crash, in a child process: there it fails alone.

The child runs `python -P -m MODULE`, whose `main` calls `serve`. Each request and each answer is a frame: four bytes of
length, big-endian, then so many bytes. The child dies with the thread that started it, and with its process.
"""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from common.process import PARENT_PID_ENV, die_with_parent

_START_S = 15.0
"""Longest time until a new process is ready."""
_END_S = 1.0
"""Longest wait for the exit status of a child that has closed its pipes."""
_LENGTH_BYTES = 4


class SandboxFailed(Exception):
    """The child has ended instead of answering."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"the child ended with {status}")
        self.took_too_long = status == -signal.SIGPROF
        """Whether the work needed more CPU time than it may; else it crashed, or was ended from outside."""


class Sandbox:
    """A child process that answers one request at a time; started when it is needed. One thread at a time."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child unless it runs. Raises TimeoutError, SandboxFailed."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, PARENT_PID_ENV: str(os.getpid())},
            start_new_session=True,
        )
        self._receive(within_s=_START_S)

    def ask(self, request: bytes, *, within_s: float) -> bytes:
        """Return the child's answer. Raises TimeoutError, SandboxFailed; then the next call begins with a new child."""
        self.start()
        process = self._process
        assert process is not None, "it was started"
        assert process.stdin is not None
        try:
            process.stdin.write(len(request).to_bytes(_LENGTH_BYTES, "big") + request)
            process.stdin.flush()
        except OSError:
            raise self._failure(process) from None
        return self._receive(within_s=within_s)

    def close(self) -> None:
        """End the child. Harmless when there is none."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _failure(self, process: subprocess.Popen[bytes]) -> SandboxFailed:
        """Return why a child has closed its pipes."""
        try:
            status = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            status = None
        self.close()
        return SandboxFailed(status)

    def _receive(self, *, within_s: float) -> bytes:
        process = self._process
        assert process is not None, "it was started"
        assert process.stdout is not None
        answers = select.poll()
        answers.register(process.stdout, select.POLLIN)
        if not answers.poll(1000 * within_s):
            self.close()
            raise TimeoutError
        answer = _read_frame(process.stdout)
        if answer is None:
            raise self._failure(process)
        return answer


def serve(answer: Callable[[bytes], bytes], *, cpu_s: float, memory_bytes: int) -> None:
    """Answer requests until stdin ends, in the main thread of a child.

    A request that takes more than `cpu_s` of CPU time, or makes the address space `memory_bytes` larger than it is now,
    ends the process.
    """
    die_with_parent()
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + memory_bytes, size + memory_bytes))
    _write_frame(b"")
    while (request := _read_frame(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
        answered = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write_frame(answered)


def _read_frame(pipe: IO[bytes]) -> bytes | None:
    """Return the next frame; None at the end of the pipe."""
    length = pipe.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    frame = pipe.read(int.from_bytes(length, "big"))
    return frame if len(frame) == int.from_bytes(length, "big") else None


def _write_frame(frame: bytes) -> None:
    sys.stdout.buffer.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
    sys.stdout.buffer.flush()
