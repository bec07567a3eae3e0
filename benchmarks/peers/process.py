"""The benchmark's side of an arm: one process group that answers one request at a time and is gone at the end."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.peers.protocol import Output, Prompts

REPOSITORY = Path(__file__).resolve().parents[2]

_STOP_GRACE_S = 5.0


class ArmFailed(Exception):
    """An arm died, fell silent or refused a request; the message says which and where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """How to start an arm."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the benchmark's own."""


class Arm:
    """A started engine; a context manager. Not thread-safe."""

    def __init__(self, spec: ArmSpec, *, log_path: Path) -> None:
        """Start the process; `wait_ready` says when it can be asked. What it prints goes to `log_path`."""
        self.name = spec.name
        self.about: dict[str, Any] = {}
        self._log_path = log_path
        with log_path.open("wb") as log:
            # In a session of its own: an interrupt at the terminal reaches the benchmark alone, which then ends the
            # whole group, the peer's own helpers included.
            self._process = subprocess.Popen(
                list(spec.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **spec.env},
                cwd=REPOSITORY,
                start_new_session=True,
            )

    def __enter__(self) -> "Arm":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()

    def wait_ready(self, *, timeout_s: float) -> None:
        """Wait until the model is loaded, and fill `about`. Raises ArmFailed."""
        self.about = self._receive(timeout_s)["ready"]

    def generate(self, prompts: Prompts, max_tokens: int, *, timeout_s: float) -> list[Output]:
        """Return one answer per prompt, each of exactly `max_tokens` tokens. Raises ArmFailed."""
        message = json.dumps({"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("died") from None
        reply = self._receive(timeout_s)
        if "error" in reply:
            raise self._failure(f"refused a request: {reply['error']}")
        outputs = [Output(**output) for output in reply["outputs"]]
        lengths = {len(output.token_ids) for output in outputs}
        if len(outputs) != len(prompts) or lengths != {max_tokens}:
            raise self._failure(f"answered {len(outputs)} prompts with {sorted(lengths)} tokens, not {max_tokens} each")
        return outputs

    def cpu_s(self) -> float:
        """Return the CPU time that the arm and its helpers have used so far."""
        total_s = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for member in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = member.cpu_times()
                    total_s += times.user + times.system
        return total_s

    def close(self) -> None:
        """End the process group. Harmless when it is over."""
        self._signal_group(signal.SIGTERM)
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal_group(signal.SIGKILL)  # whatever of the group is left, also behind a leader that has ended
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next line. The conversation is strictly in turns, so that none waits in a buffer."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        descriptor = self._process.stdout.fileno()
        received = bytearray()
        while not received.endswith(b"\n"):
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
            if not readable:
                raise self._failure(f"said nothing for {timeout_s:.0f} s")
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise self._failure("died")
            received += chunk
        reply: dict[str, Any] = json.loads(received)
        return reply

    def _failure(self, what: str) -> ArmFailed:
        try:
            lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        tail = "\n".join(f"    {line}" for line in lines[-8:])
        return ArmFailed(f"{self.name} {what}; its log is {self._log_path}, which ends with\n{tail}")
