"""Identities of a benchmark's processes: the benchmark is their authority and enrols the children that it starts.

A child gets its certificate over its standard streams, as from a launcher (common/trust/pipe.py): `python -m router`
does so by itself, a mock by `enrol_child`. What the parent plays itself, the controller or another worker, has its
credentials from the same authority (`Credentials.of`).
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
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


def first_line(child: "subprocess.Popen[bytes]", authority: Authority, *, role: Role, name: str) -> str:
    """Enrol a child under a name; returns the first other line of its stdout, empty when it has ended. Blocks."""
    assert child.stdin is not None
    assert child.stdout is not None
    for line in child.stdout:
        answer = answer_to(line.decode(), partial(authority.enrol, role=role, name=name))
        if answer is None:
            return line.decode()
        child.stdin.write(answer.encode())
        child.stdin.flush()
    return ""


@asynccontextmanager
async def running_child(
    authority: Authority, *command: str, role: Role, name: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[Ready]:
    """Run a Python module under a name until the block is left; yields what its ready line says.

    `env` is added to the environment. Raises RuntimeError when it does not start.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **(env or {}), PARENT_PID_ENV: str(os.getpid())},
    )
    try:
        yield await _until_ready(child, authority, role=role, name=name)
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def _until_ready(child: asyncio.subprocess.Process, authority: Authority, *, role: Role, name: str) -> Ready:
    assert child.stdin is not None
    assert child.stdout is not None
    async for line in child.stdout:
        if (ready := parse_ready(line.decode())) is not None:
            return ready
        answer = answer_to(line.decode(), partial(authority.enrol, role=role, name=name))
        if answer is not None:
            child.stdin.write(answer.encode())
            await child.stdin.drain()
    raise RuntimeError(f"{name} did not start")
