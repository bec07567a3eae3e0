"""Kinds of faults for processes of a running cluster, each for a while. What a machine cannot do is left out."""

import asyncio
import errno
import random
import resource
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.faults import PrivateNetwork, listening_ports, send, throttled

Inflict = Callable[[int], AbstractAsyncContextManager[None]]
"""Hurts the process of a pid while its block runs."""
FILL_BYTES = 1 << 20
_SPARE_FDS = 2
_SPARE_MEMORY = 4 << 20


@asynccontextmanager
async def killed(pid: int) -> AsyncIterator[None]:
    """SIGKILL; its supervisor starts a successor meanwhile."""
    send(pid, signal.SIGKILL)
    yield


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """SIGSTOP, then SIGCONT; its supervisor may have replaced it by then."""
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


@asynccontextmanager
async def slowed(pid: int) -> AsyncIterator[None]:
    """It runs one part in eight of the time."""
    with throttled(pid, times=8.0):
        yield


def limited(kind: int, spare: Callable[[psutil.Process], int]) -> Inflict:
    """Return the fault of a process that gets no more of a resource than it has and a little."""

    @asynccontextmanager
    async def inflict(pid: int) -> AsyncIterator[None]:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            before = process.rlimit(kind)
            process.rlimit(kind, (spare(process), before[1]))
            try:
                yield
            finally:
                with suppress(psutil.NoSuchProcess):
                    process.rlimit(kind, before)
            return
        yield

    return inflict


def cut(network: PrivateNetwork, *, to: bool, back: bool) -> Inflict:
    """Return the fault of a process whose listeners are cut off, in one direction or both."""

    @asynccontextmanager
    async def inflict(pid: int) -> AsyncIterator[None]:
        try:
            ports = listening_ports(pid)
        except psutil.Error:
            ports = []
        with network.cut(ports, to=to, back=back):
            yield

    return inflict


def full(folder: Path) -> Inflict:
    """Return the fault of a full disk under `folder`, whichever process it is for."""

    @asynccontextmanager
    async def inflict(_pid: int) -> AsyncIterator[None]:
        path = folder / "ballast"
        try:
            await asyncio.to_thread(_fill, path)
            yield
        finally:
            path.unlink(missing_ok=True)

    return inflict


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(FILL_BYTES)):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def netem(options: str) -> Inflict:
    """Return the fault of a network on which everything is late or lossy."""

    @asynccontextmanager
    async def inflict(_pid: int) -> AsyncIterator[None]:
        _tc("add", *options.split())
        try:
            yield
        finally:
            _tc("del")

    return inflict


def find_kinds(network: PrivateNetwork | None, disk: Path | None) -> tuple[dict[str, Inflict], dict[str, str]]:
    """Return the kinds that this machine can do, and why it cannot do others.

    `network`: cuts are made there; `disk`: a small file system of this cluster alone.
    """
    kinds: dict[str, Inflict] = {
        "kill": killed,
        "stop": stopped,
        "slow": slowed,
        "descriptor limit": limited(resource.RLIMIT_NOFILE, lambda process: process.num_fds() + _SPARE_FDS),
        "memory limit": limited(resource.RLIMIT_AS, lambda process: process.memory_info().vms + _SPARE_MEMORY),
    }
    missing: dict[str, str] = {}
    if network is None:
        missing["cuts, delay, loss"] = "needs root and `ip`, for a network of its own"
    else:
        kinds["cut"] = cut(network, to=True, back=True)
        kinds["cut to it"] = cut(network, to=True, back=False)
        kinds["cut from it"] = cut(network, to=False, back=True)
        try:
            _tc("add", "netem", "delay", "1ms")
            _tc("del")
            kinds["delay"] = netem("netem delay 50ms 30ms")
            kinds["loss"] = netem("netem loss 2%")
        except (OSError, subprocess.CalledProcessError):
            missing["delay, loss"] = "needs `tc` and a kernel with netem"
    if disk is None:
        missing["full disk"] = "needs root, for a small tmpfs"
    else:
        kinds["full disk"] = full(disk)
    return kinds, missing


def draw_seconds(draw: random.Random) -> float:
    """Return the length of a fault: short ones are as likely as long ones."""
    return float(0.3 * 60.0 ** draw.random())


def draw_kind(draw: random.Random, kinds: Mapping[str, Inflict]) -> str:
    """Return a kind of fault."""
    return draw.choice(sorted(kinds))


def _tc(action: str, *options: str) -> None:
    command = ["tc", "qdisc", action, "dev", "lo", "root", *options]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
