"""A supervisor whose fork server forks fake services: python -m tests.cluster.forking_supervisor RUN_DIR SCENARIO.

Prints what a scenario returns as JSON. A fork server needs a process without other threads, which a test is not.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from cluster.processes.fork_server import ForkedService, ForkServer, start_fork_server
from cluster.processes.launch_local import LocalLauncher
from cluster.processes.launcher import StartFailed
from cluster.processes.plan import ProcessSpec
from tests.cluster.support import make_spec
from tests.trust import AUTHORITY

_MODES = {"decode-1": ["--with-child"], "decode-2": ["--fail", "port is taken"], "decode-3": ["--never-ready"]}


def command_of(spec: ProcessSpec) -> Sequence[str]:
    """Return the command of a fake service, whose name decides what it does."""
    return [
        sys.executable,
        "-P",
        "-m",
        "tests.cluster.fake_service",
        f"{spec.name}.invalid:1",
        *_MODES.get(spec.name, ()),
    ]


async def life(launcher: LocalLauncher) -> dict[str, Any]:
    process = await launcher.start(make_spec("decode-0"))
    known = psutil.Process(process.ready.pid)
    told = {
        "address": process.ready.address,
        "is_child": known.ppid() == os.getpid(),
        "leads_session": os.getsid(known.pid) == known.pid,
        "command": " ".join(known.cmdline()).strip(),
        "descriptors": sorted(os.listdir(f"/proc/{known.pid}/fd"), key=int),
    }
    await process.stop(10)
    return told | {"is_over": not psutil.pid_exists(known.pid), "end": await process.exited()}


async def kill(launcher: LocalLauncher) -> str:
    process = await launcher.start(make_spec("decode-0"))
    os.kill(process.ready.pid, signal.SIGKILL)
    return await process.exited()


async def failure(launcher: LocalLauncher) -> str:
    try:
        await launcher.start(make_spec("decode-2"))
    except StartFailed as error:
        return str(error)
    return ""


async def lost_server(launcher: LocalLauncher) -> list[str]:
    """Kill the fork server below a service, which lives on, and start another."""
    first = await launcher.start(make_spec("decode-0"))
    (server,) = (child for child in psutil.Process().children() if child.pid != first.ready.pid)
    server.kill()
    second = await launcher.start(make_spec("decode-4"))
    told = [second.ready.address, psutil.Process(first.ready.pid).status()]
    for process in (first, second):
        await process.stop(10)
    return told


async def strays(launcher: LocalLauncher) -> list[bool]:
    """Kill a service with a child, then that child, and another service: nothing may stay a zombie."""
    process = await launcher.start(make_spec("decode-1"))
    (child,) = psutil.Process(process.ready.pid).children()
    os.kill(process.ready.pid, signal.SIGKILL)
    await process.exited()
    was_inherited = child.ppid() == os.getpid()
    child.kill()
    while child.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.005)
    await kill(launcher)
    return [was_inherited, child.is_running()]


async def cancelled(launcher: LocalLauncher) -> int:
    """Cancel starts at different moments; return how many children are left, the fork server included."""
    for pauses in range(12):
        start = asyncio.create_task(launcher.start(make_spec("decode-3")))
        for _ in range(pauses):
            await asyncio.sleep(0)
        await asyncio.sleep(0.001 * (pauses % 4))
        start.cancel()
        await asyncio.wait([start])
    return len(psutil.Process().children())


async def endless(launcher: LocalLauncher) -> None:
    """Tell all pids, and wait to be killed."""
    await launcher.start(make_spec("decode-0"))
    print(json.dumps([child.pid for child in psutil.Process().children()]), flush=True)  # noqa: T201
    await asyncio.Event().wait()


_SCENARIOS: dict[str, Callable[[LocalLauncher], Awaitable[object]]] = {
    each.__name__: each for each in (life, kill, failure, lost_server, strays, cancelled, endless)
}


async def run(folder: Path, name: str, fork_server: ForkServer | None) -> object:
    launcher = LocalLauncher(command=command_of, run_dir=folder, authority=AUTHORITY, fork_server=fork_server)
    try:
        return await _SCENARIOS[name](launcher)
    finally:
        await launcher.close()


def main() -> None:
    forked = start_fork_server(["common.process"])
    if isinstance(forked, ForkedService):
        return forked.run()
    told = asyncio.run(run(Path(sys.argv[1]), sys.argv[2], forked))
    print(json.dumps({"told": told, "left": len(psutil.Process().children())}))  # noqa: T201
    return None


if __name__ == "__main__":
    main()
