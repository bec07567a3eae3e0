"""Supervisors whose fork servers fork fake services: python -m tests.cluster.forking_supervisor.

Each line of stdin, `RUN_DIR SCENARIO`, is a supervisor that prints what its scenario returns as JSON. It is a process
of its own, since it becomes the parent of every orphan below it: a fork, which needs no imports.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from cluster.processes import child, fork_server
from cluster.processes.launch_local import LocalLauncher
from cluster.processes.plan import ProcessSpec
from cluster.processes.run_dir import log_path
from tests.cluster.support import make_spec
from tests.trust import AUTHORITY

_MODES = {
    "decode-1": ["--with-child"],
    "decode-3": ["--never-ready"],
    "decode-4": ["--say", "spoken"],
}


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


async def kill(launcher: LocalLauncher) -> None:
    process = await launcher.start(make_spec("decode-0"))
    os.kill(process.ready.pid, signal.SIGKILL)
    await process.exited()


def servers() -> list[psutil.Process]:
    """Return the fork servers among our children."""
    return [each for each in psutil.Process().children() if "cluster.processes.fork_server" in each.cmdline()]


async def lost_server(launcher: LocalLauncher) -> list[object]:
    """Kill the fork server below a service, which lives on, and start another service."""
    first = await launcher.start(make_spec("decode-0"))
    (server,) = servers()
    server.kill()
    second = await launcher.start(make_spec("decode-5"))
    told = [second.ready.address, psutil.Process(first.ready.pid).status(), servers() not in ([], [server])]
    for process in (first, second):
        await process.stop(10)
    return told


async def stopped_server(launcher: LocalLauncher) -> str:
    """Stop the fork server, and start a service."""
    fork_server._ANSWER_S = 0.5  # noqa: SLF001
    await (await launcher.start(make_spec("decode-0"))).stop(10)
    (server,) = servers()
    server.suspend()
    process = await launcher.start(make_spec("decode-5"))
    await process.stop(10)
    return process.ready.address


def change_module() -> None:
    path = Path("spoken.py")
    path.write_text(path.read_text().replace("old", "new"))
    os.utime(path, (0, 0))  # whatever the resolution of the clock


async def changed_module(launcher: LocalLauncher) -> str:
    """Start a service that says a word of its module, twice, then change the module and start it again."""
    for _ in range(2):
        await (await launcher.start(make_spec("decode-4"))).stop(10)
    change_module()
    await (await launcher.start(make_spec("decode-4"))).stop(10)
    return log_path(Path.cwd(), "decode-4").read_text()


async def secrets(launcher: LocalLauncher) -> list[str]:
    """Return what a variable that is only for routers holds here, in the fork server, and in a service."""
    process = await launcher.start(replace(make_spec("decode-0"), env={"ROUTERS_SECRET": ""}))
    (server,) = servers()
    told = [psutil.Process(pid).environ().get("ROUTERS_SECRET", "") for pid in (server.pid, process.ready.pid)]
    await process.stop(10)
    return [os.environ["ROUTERS_SECRET"], *told]


async def strays(launcher: LocalLauncher) -> bool:
    """Kill a service with a child, then that child, and return whether it was ours at last; it is reaped."""
    process = await launcher.start(make_spec("decode-1"))
    (orphan,) = psutil.Process(process.ready.pid).children()
    os.kill(process.ready.pid, signal.SIGKILL)
    await process.exited()
    was_inherited = orphan.ppid() == os.getpid()
    orphan.kill()
    async with asyncio.timeout(30):
        while orphan.is_running():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
    return was_inherited


async def cancelled(launcher: LocalLauncher) -> int:
    """Cancel starts at different moments; return how many children are left, the fork server included."""
    await kill(launcher)
    for pauses in range(12):
        start = asyncio.create_task(launcher.start(make_spec("decode-3")))
        for _ in range(pauses):
            await asyncio.sleep(0)
        await asyncio.sleep(0.001 * (pauses % 4))
        start.cancel()
        await asyncio.wait([start])
    await kill(launcher)  # by then every cancelled fork is there
    async with asyncio.timeout(30):
        while len(psutil.Process().children()) > 1:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
    return len(psutil.Process().children())


async def endless(launcher: LocalLauncher) -> None:
    """Tell our pid and those of our children, and wait to be killed."""
    await launcher.start(make_spec("decode-0"))
    tell([os.getpid(), *(child.pid for child in psutil.Process().children())])
    await asyncio.Event().wait()


_ALL = (life, lost_server, stopped_server, changed_module, secrets, strays, cancelled, endless)
_SCENARIOS: dict[str, Callable[[LocalLauncher], Awaitable[object]]] = {each.__name__: each for each in _ALL}
_MODULES = ("spoken", "common.tracing")


def tell(told: object) -> None:
    """Print what is told, and how many children we have."""
    print(json.dumps({"told": told, "left": len(psutil.Process().children())}), flush=True)  # noqa: T201


async def run(name: str) -> object:
    launcher = LocalLauncher(
        command=command_of, run_dir=Path.cwd(), authority=AUTHORITY, modules=lambda _spec: _MODULES
    )
    await launcher.open()
    try:
        async with asyncio.timeout(60):
            return await _SCENARIOS[name](launcher)
    finally:
        await launcher.close()


def supervise(folder: str, name: str) -> None:
    """Run a scenario in its folder, where its services find the module that they say a word of."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join((folder, os.environ["PYTHONPATH"]))
    tell(asyncio.run(run(name)))


def main() -> None:
    child.LOOK_S = 0.05
    os.environ["ROUTERS_SECRET"] = "hush-hush"
    for line in sys.stdin:
        folder, name = line.split()
        pid = os.fork()
        if pid == 0:
            supervise(folder, name)
            return
        _, status = os.waitpid(pid, 0)
        if status and name != endless.__name__:  # it has told nothing, and its test waits
            tell("failed")


if __name__ == "__main__":
    main()
