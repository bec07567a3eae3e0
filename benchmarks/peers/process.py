"""The benchmark's side of an arm: one process group that answers one request at a time and is gone at the end."""

import contextlib
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.group import ArmSpec, cpu_s, end_group, log_tail, start_group
from benchmarks.peers.protocol import Output, Prompts

_STOP_GRACE_S = 5.0


class ArmFailed(Exception):
    """An arm died, fell silent or refused a request; the message says which and where its log is."""


class Arm:
    """A started engine; a context manager. Not thread-safe."""

    def __init__(self, spec: ArmSpec, *, log_path: Path) -> None:
        """Start the process; `wait_ready` says when it can be asked. Its other output goes to `log_path`."""
        self.name = spec.name
        self.about: dict[str, Any] = {}
        self._log_path = log_path
        self._process = start_group(spec, log_path=log_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

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
        return cpu_s(self._process.pid)

    def close(self) -> None:
        """End the process group. Harmless when it is over."""
        try:
            end_group(self._process, grace_s=_STOP_GRACE_S)
        finally:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

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
        tail = log_tail(self._log_path)
        return ArmFailed(f"{self.name} {what}; its log is {self._log_path}, which ends with\n{tail}")
