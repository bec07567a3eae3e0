"""Identities of a benchmark's processes: the benchmark is their authority and enrols the children that it starts.

A child gets its certificate over its standard streams, as from a launcher (common/trust/pipe.py): `python -m router`
does so by itself, a mock by `enrol_child`. The parts that the parent plays itself, the controller or another worker,
have their credentials from the same authority (`Credentials.of`).
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from common.process import PARENT_PID_ENV, Ready, parse_ready
from common.trust.authority import Authority, AuthoritySettings
from common.trust.credentials import Credentials
from common.trust.identity import Role
from common.trust.pipe import EnrolmentPipe, answer_to

HOST = "127.0.0.1"
PLAIN = AuthoritySettings(cluster="benchmark", is_encrypted=False)
"""Connections without TLS; inside the cluster callers show proofs."""
ENCRYPTED = AuthoritySettings(cluster="benchmark", is_encrypted=True)


async def enrol_child() -> Credentials:
    """Return the credentials that this process has from the one that started it. Raises NotEnrolled."""
    credentials = Credentials()
    await EnrolmentPipe(credentials, lambda: [HOST]).open()
    return credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A running child."""

    pid: int
    line: str
    """The first line that it printed behind its enrolment."""

    @property
    def ready(self) -> Ready:
        """Content of its ready line. Raises RuntimeError when the line is none."""
        ready = parse_ready(self.line)
        if ready is None:
            raise RuntimeError(f"{self.line!r} is not a ready line")
        return ready


@asynccontextmanager
async def running_child(authority: Authority, *command: str, role: Role, name: str) -> AsyncIterator[Child]:
    """Run a Python module under a name until the block is left; yields it once it has printed a line.

    Raises RuntimeError with the end of its log when it does not start.
    """
    with tempfile.TemporaryFile() as log:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, PARENT_PID_ENV: str(os.getpid())},
        )
        try:
            line = await _first_line(child, authority, role=role, name=name)
            if not line:
                log.seek(0)
                raise RuntimeError(f"{name} did not start: {log.read().decode(errors='replace')[-500:]}")
            yield Child(pid=child.pid, line=line)
        finally:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()


async def _first_line(child: asyncio.subprocess.Process, authority: Authority, *, role: Role, name: str) -> str:
    """Enrol a child; returns the first other line of its output, empty when it has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    async for line in child.stdout:
        answer = answer_to(line.decode(), partial(authority.enrol, role=role, name=name))
        if answer is None:
            return line.decode()
        child.stdin.write(answer.encode())
        await child.stdin.drain()
    return ""
