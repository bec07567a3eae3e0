"""Tries grammars in a process of their own, which may take long, run out of memory or crash in place of the worker.

`python -m engine.grammar_trial` reads one line that describes the compiler, then a structure in each line with the CPU
time that it may take, and answers each with a line: an error, or an empty one. It dies with its parent.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from common.errors import InvalidRequest, Overloaded
from common.process import PARENT_PID_ENV, die_with_parent
from common.structured_outputs import FIELD
from engine.grammar import Grammars

TRIAL_S = 2.0
"""CPU time that a grammar may take to compile and to compute its first mask."""
WALL_S = 6.0
"""Longest time until that is known, on a host with other work; and longest wait for earlier trials."""
START_S = 15.0
"""Longest time until a new process is ready."""
MEMORY_BYTES = 1 << 30
"""Address space that a trial may take beyond that of the idle process."""
MAX_REFUSED = 1024


class GrammarTrial:
    """The process, started when it is first needed. Any thread; one trial at a time."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._refused: dict[str, str] = {}
        """Reasons by structure."""

    def pass_or_refuse(self, text: str) -> None:
        """Return when a structure has been compiled elsewhere: within 2 * WALL_S, and START_S for a new process.

        Raises InvalidRequest, and Overloaded when the host is too busy to find out.
        """
        if not self._lock.acquire(timeout=WALL_S):
            raise _busy()
        try:
            reason = self._refused.get(text)
            if reason is None and (reason := self._try(text)):
                if len(self._refused) >= MAX_REFUSED:
                    self._refused.clear()
                self._refused[text] = reason
        finally:
            self._lock.release()
        if reason:
            raise InvalidRequest(reason, field=FIELD)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _try(self, text: str) -> str:
        """Return why a structure is refused; empty when it is not. Raises Overloaded."""
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return str(self._ask((TRIAL_S, text), within_s=WALL_S))
        except TimeoutError:
            self._end()
            raise _busy() from None
        except OSError:
            self._end()
            return f"structured_outputs cannot be compiled: it takes more than {TRIAL_S:g} s or too much memory"

    def _start(self) -> None:
        environment = {**os.environ, PARENT_PID_ENV: str(os.getpid())}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.grammar_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._ask(self._grammars.description, within_s=START_S)

    def _ask(self, value: Any, *, within_s: float) -> Any:
        """Send a line and return the answer. Raises TimeoutError, and another OSError when the process has ended."""
        process = self._process
        assert process is not None, "it was started"
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()
        answers = select.poll()
        answers.register(process.stdout, select.POLLIN)
        if not answers.poll(1000 * within_s):
            raise TimeoutError
        line = process.stdout.readline()
        if not line:
            raise BrokenPipeError
        return json.loads(line)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def _busy() -> Overloaded:
    return Overloaded("the host is too busy to compile structured_outputs", retry_after_s=1.0)


def main() -> None:
    """Serve trials until stdin ends."""
    die_with_parent()
    grammars = Grammars.described(json.loads(sys.stdin.buffer.readline()))
    with contextlib.suppress(InvalidRequest):
        grammars.compile('{"regex": "a"}')  # loads the library before memory is limited
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    _answer("")
    for line in sys.stdin.buffer:
        cpu_s, structure = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
        try:
            grammars.compile(structure)
        except InvalidRequest as error:
            reason = error.message
        else:
            reason = ""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(reason)


def _answer(text: str) -> None:
    sys.stdout.write(json.dumps(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
