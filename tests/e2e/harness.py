"""Starts real clusters for tests and takes them apart again."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster import lifecycle
from cluster.lifecycle import ClusterInfo
from cluster.processes.state import ProcessState, StateFile
from common.config import load_config
from common.process import ProcessIdentity
from kvrelay.client import AsyncClient, AsyncGenerationStream, Generation, Token, WorkerView

POLL_S = 0.2
"""Time between two looks at a cluster. Each asks every process of it, and keeps cores from what is awaited."""
FAKE_POOL: dict[str, Any] = {"num_blocks": 512, "block_size": 16, "max_step_tokens": 256, "max_running": 64}


def fake_config(*, launcher: str = "local", step_ms: float = 2.0, **sections: Any) -> dict[str, Any]:
    """Return a serving.yaml for fake engines; keyword arguments replace whole sections."""
    config: dict[str, Any] = {
        "name": "e2e",
        "launcher": launcher,
        "model": {"engine": "fake", "fake_step_ms": step_ms, "max_model_len": 4096},
        "pools": {"prefill": dict(FAKE_POOL), "decode": dict(FAKE_POOL)},
        "router": {"port": 0, "local_prefill_max_tokens": 32},
    }
    config |= sections
    # On a busy machine a process may get no core for seconds; only tests of stopped processes take that for silence.
    config["router"] = {"silence_s": 10.0} | config["router"]
    return config


@contextmanager
def standing_cluster(folder: Path, config: dict[str, Any]) -> Iterator[ClusterInfo]:
    """Start a cluster in `folder`/run and stop everything; fails when a process outlives it."""
    config_path = folder / "serving.yaml"
    config_path.write_text(yaml.safe_dump(config), encoding="utf-8")
    run_dir = folder / "run"
    info = lifecycle.up(load_config(config_path), config_path=config_path, run_dir=run_dir, report=lambda _: None)
    started = family(info.pid)
    try:
        yield info
    finally:
        known = {*started, *family(info.pid), *members(run_dir)}
        lifecycle.down(run_dir, report=lambda _: None)
        left = [each for each in known if each.is_alive()]
        assert not left, f"processes outlive the cluster: {left}"
        assert lifecycle.read_info(run_dir) is None


@asynccontextmanager
async def running_cluster(
    folder: Path, config: dict[str, Any], *, timeout_s: float = 120
) -> AsyncIterator[AsyncClient]:
    """Run a cluster for the block, which gets a client. `timeout_s` is the default deadline of its requests."""
    cluster = standing_cluster(folder, config)
    info = await asyncio.to_thread(cluster.__enter__)
    try:
        async with AsyncClient(info.address, timeout_s=timeout_s, tls=info.tls) as client:
            yield client
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)


def family(pid: int) -> list[ProcessIdentity]:
    """Return the identities of a process and all below it that live."""
    try:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []
    return [identity for identity in map(ProcessIdentity.of, pids) if identity is not None]


def members(run_dir: Path) -> list[ProcessIdentity]:
    """Return the identities of all processes that a cluster's state names, none when it has no state."""
    state = StateFile(run_dir).read()
    if state is None:
        return []
    own = [process.identity for process in state.processes if process.identity is not None]
    return [*own, *state.helpers, state.supervisor]


def process_of(run_dir: Path, name: str) -> ProcessState:
    """Return what the supervisor says of a process."""
    state = StateFile(run_dir).read()
    assert state is not None
    (found,) = [each for each in state.processes if each.name == name]
    return found


async def worker(client: AsyncClient, role: str, index: int = 0) -> WorkerView:
    """Return a worker as the router sees it, as soon as it does and the worker tells its status."""
    while True:  # a dead worker is no member until its successor is up; a busy one may tell its status too late
        workers = [view for view in (await client.status()).workers if view.role == role]
        if len(workers) > index and workers[index].status is not None:
            return workers[index]
        await asyncio.sleep(POLL_S)


async def reporting_workers(client: AsyncClient) -> Sequence[WorkerView]:
    """Return all workers as soon as each of them tells its status: a busy one may tell it too late."""
    while True:
        workers = (await client.status()).workers
        if all(view.status is not None for view in workers):
            return workers
        await asyncio.sleep(POLL_S)


async def busiest_worker(client: AsyncClient, role: str) -> WorkerView:
    """Return the worker of a pool that runs most, as soon as one of them says that it runs something."""

    def num_running(view: WorkerView) -> int:
        return 0 if view.status is None else view.status.load.num_running

    while True:
        found = max((view for view in await reporting_workers(client) if view.role == role), key=num_running)
        if num_running(found):
            return found
        await asyncio.sleep(POLL_S)


async def pids(client: AsyncClient) -> dict[str, int]:
    """Return the process of each worker."""
    return {view.worker_id: view.status.pid for view in await reporting_workers(client) if view.status}


async def killed_midway(
    client: AsyncClient, *asks: Callable[[], AsyncGenerationStream], num_tokens: int = 8
) -> list[Generation]:
    """Kill the decode worker once each answer has so many tokens; returns the answers, all of which it has hit.

    On a fast host an answer may be over by then, so that they are asked for again.
    """
    pid = 0
    for _ in range(6):

        async def restarted(former: int = pid) -> bool:
            view = await worker(client, "decode")
            return view.status is not None and view.status.pid != former

        await until(restarted, timeout_s=60, what="the decode worker is back")
        view = await worker(client, "decode")
        assert view.status is not None
        pid = view.status.pid
        streams = [ask() for ask in asks]
        await asyncio.gather(*(_until_token(stream, num_tokens) for stream in streams))
        os.kill(pid, signal.SIGKILL)
        answers = [await stream.result() for stream in streams]
        if all(len(answer.plans) > 1 for answer in answers):
            return answers
    raise AssertionError("each time an answer was over before the kill")


async def _until_token(stream: AsyncGenerationStream, number: int) -> None:
    async for event in stream:
        number -= isinstance(event, Token)
        if not number:
            return


async def until(
    condition: Callable[[], Awaitable[bool]], *, timeout_s: float, what: str, poll_s: float = POLL_S
) -> float:
    """Poll until a condition holds; returns the seconds it took."""
    started_s = time.monotonic()
    while not await condition():
        assert time.monotonic() - started_s < timeout_s, f"timed out: {what}"
        await asyncio.sleep(poll_s)
    return time.monotonic() - started_s


async def until_idle(client: AsyncClient, *, timeout_s: float = 60) -> None:
    """Wait until `status` shows that nothing is held anywhere."""

    async def idle() -> bool:
        return not await held(client)

    try:
        await until(idle, timeout_s=timeout_s, what="nothing is held")
    except AssertionError:
        raise AssertionError(f"still held: {await held(client)}") from None


async def held(client: AsyncClient) -> dict[str, int]:
    """Return everything that the cluster's status reports as held, where it is not zero."""
    status = await client.status()
    router = status.router
    found = {
        "router.queued": router.num_queued,
        "router.active": router.num_active,
        "router.fleet.bookings": router.num_bookings,
        "router.tasks": router.num_request_tasks,
    }
    for view in status.workers:
        if view.status is None:
            found[f"{view.worker_id}.unreachable"] = 1
            continue
        found[f"{view.worker_id}.used_blocks"] = view.status.num_used_blocks
        found[f"{view.worker_id}.leases"] = view.status.num_leases
        found[f"{view.worker_id}.reservations"] = view.status.num_reservations
        found[f"{view.worker_id}.tasks"] = view.status.num_request_tasks
        found[f"{view.worker_id}.running"] = view.status.load.num_running
        found[f"{view.worker_id}.waiting"] = view.status.load.num_waiting
    return {name: count for name, count in found.items() if count}
