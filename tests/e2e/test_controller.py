"""The controller in an existing Ray cluster is killed under load, lost, refused; clients notice nothing."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from cluster import lifecycle
from cluster.control import scale
from cluster.lifecycle import ClusterError, ClusterInfo, read_info
from cluster.processes.state import ClusterPhase, StateFile
from common.config import load_config
from common.ports import free_port
from common.process import ProcessIdentity
from kvrelay.client import AsyncClient
from tests.cluster.ray_nodes import RayNodes, ray_nodes
from tests.e2e.harness import FAKE_POOL, fake_config, pids, until
from tests.e2e.streams import answers, running_streams
from tests.hosts.certificates import shown_by

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.e2e

NUM_TOKENS = 100
NAME = "e2e"
POOL = FAKE_POOL | {"num_cpus": 1}
GPU_POOL = POOL | {"num_gpus": 2, "placement": "spread"}
NODES = (
    {"num_cpus": 2, "labels": {"pool": "prefill"}},
    {"num_cpus": 4, "num_gpus": 4, "labels": {"pool": "decode"}},
)
_LIFETIME_S = 36.0
"""A third of it, the time between renewal and end, has to be enough for a controller to come back."""
_NUM_CERTIFICATES = 3
"""Certificates of a router that lives on: the first, a renewal, and one from the new controller."""
_ACTORS = "ray._private.state.state._connect_and_get_accessor().get_actor_table(None, None)"
_SHOWN = (
    "{each.name: [each.class_name, each.repr_name] for each in"
    f" map(ray.core.generated.gcs_pb2.ActorTableData.FromString, {_ACTORS}) if each.state == 2}}"
)
"""Class and name of the living actors, as Ray's dashboard shows them."""
_NAMES = "ray.util.list_named_actors(all_namespaces=True)"
_AGENTS = "[[node['NodeManagerAddress'], node['MetricsExportPort']] for node in ray.nodes()]"
_HAS_AGENT = find_spec("aiohttp_cors") is not None and find_spec("opencensus") is not None


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """A Ray cluster to join, from a folder with another project's package `common`, which must not run."""
    foreign = tmp_path_factory.mktemp("foreign") / "common" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("raise ImportError('another project')")
    with ray_nodes(NODES) as nodes, pytest.MonkeyPatch.context() as here:
        for key, value in nodes.environment.items():
            here.setenv(key, value)
        here.chdir(foreign.parents[1])
        yield nodes


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of ours in the Ray cluster."""

    folder: Path
    info: ClusterInfo
    planner_port: int


@pytest.fixture(scope="module")
def cluster(nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster that the first tests use, in their order; the last of them ends it."""
    folder, port = tmp_path_factory.mktemp("cluster"), free_port("127.0.0.1")
    with running(folder, planner={"mode": "advise", "metrics_port": port}) as info:
        yield Cluster(folder, info, port)


def client_of(info: ClusterInfo) -> AsyncClient:
    return AsyncClient(info.address, tls=info.tls, timeout_s=120)


def _ca(info: ClusterInfo) -> bytes:
    """Return what clients know the doors by."""
    return Path(str(info.tls)).read_bytes()


def bring_up(folder: Path, **sections: Any) -> ClusterInfo:
    sections = {"pools": {"prefill": POOL, "decode": GPU_POOL}} | sections
    path = folder / "serving.yaml"
    path.write_text(yaml.safe_dump(fake_config(launcher="ray", step_ms=60.0, **sections)), encoding="utf-8")
    return lifecycle.up(load_config(path), config_path=path, run_dir=folder / "run", report=lambda _: None)


@contextmanager
def running(folder: Path, **sections: Any) -> Iterator[ClusterInfo]:
    info = bring_up(folder, **sections)
    try:
        yield info
    finally:
        if StateFile(folder / "run").read() is not None:
            lifecycle.down(folder / "run", report=lambda _: None)


async def kill_controller(run_dir: Path) -> float:
    """Kill -9 the controller and return how long it took until its next life looked after everything, seconds."""
    state_file = StateFile(run_dir)
    before = state_file.read()
    assert before is not None
    before.supervisor.signal(signal.SIGKILL)

    async def is_back() -> bool:
        state = state_file.read()
        return state is not None and state.supervisor != before.supervisor and state.phase is ClusterPhase.READY

    return await until(is_back, timeout_s=120, what="the controller is back")


async def test_controller_killed_under_load_adopts_everything_and_no_client_notices(
    nodes: RayNodes, cluster: Cluster
) -> None:
    run_dir = cluster.folder / "run"
    async with client_of(cluster.info) as client:
        assert len(await asyncio.to_thread(lambda: list(scale(run_dir, {"decode": 2}, grace_s=30)))) > 0
        before = await pids(client)
        assert set(before) == {"prefill-0", "decode-0", "decode-1"}
        shown = await asyncio.to_thread(nodes.ask, _SHOWN)
        assert {name: kind for name, (kind, _) in shown.items()} == {
            f"{NAME}/controller": "ControllerActor",
            f"{NAME}/router-0": "Router",
            f"{NAME}/prefill-0": "PrefillWorker",
            f"{NAME}/decode-0": "DecodeWorker",
            f"{NAME}/decode-1": "DecodeWorker",
        }
        assert shown[f"{NAME}/decode-1"][1] == f"{NAME}/decode-1 (decode on 127.0.0.2)"
        if _HAS_AGENT:
            await _until_agents_show_every_process(nodes)
        async with running_streams(client, num_tokens=NUM_TOKENS):
            took_s = await kill_controller(run_dir)

        logger.info("the controller was back after %.2f s", took_s)
        assert await pids(client) == before
        status = (await client.status()).router
        assert status.num_failed == status.num_replans == 0
        # It owns what it has adopted: sizes and placement groups.
        await asyncio.to_thread(lambda: list(scale(run_dir, {"decode": 1}, grace_s=30)))
        assert await pids(client) == {name: pid for name, pid in before.items() if name != "decode-1"}
        groups = "[g['name'] for g in ray.util.placement_group_table().values() if g['state'] == 'CREATED']"
        assert await asyncio.to_thread(nodes.ask, groups) == [f"{NAME}/decode-0"]


async def _until_agents_show_every_process(nodes: RayNodes) -> None:
    agents = await asyncio.to_thread(nodes.ask, _AGENTS)

    async def is_shown() -> bool:
        pages = [await asyncio.to_thread(_page, f"http://{host}:{port}/metrics") for host, port in agents]
        lines = [line for page in pages for line in page.splitlines() if f'cluster="{NAME}"' in line]
        return all(
            any(line.startswith(f"ray_{name}{{") and all(tag in line for tag in tags) for line in lines)
            for name, tags in (
                ("kvrelay_worker_state", ('process="router-0"', 'worker="decode-1"', 'state="ready"')),
                ("kvrelay_kv_blocks", ('pool="decode"', 'process="decode-1"', 'role="decode"')),
                ("kvrelay_sequences_waiting", ('pool="prefill"', 'process="prefill-0"')),
                ("kvrelay_wall_share", ('pool="decode"', 'wall="waiting"')),
                ("kvrelay_requests_total", ('pool="router"', 'outcome="completed"')),
            )
        )

    await until(is_shown, timeout_s=120, what="Ray's agents show the figures of every process")


def _page(url: str) -> str:
    with urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


async def test_controller_that_cannot_take_over_tries_again_until_it_can(cluster: Cluster) -> None:
    state_file = StateFile(cluster.folder / "run")
    async with client_of(cluster.info) as client:
        before, state = await pids(client), state_file.read()
        assert state is not None
        state.supervisor.signal(signal.SIGKILL)
        with await asyncio.to_thread(_take, cluster.planner_port):

            async def says_why() -> bool:
                state = state_file.read()
                return state is not None and "planner.metrics_port" in state.trouble

            await until(says_why, timeout_s=120, what="the controller says that its port is taken")

        async def supervises() -> bool:
            state = state_file.read()
            return state is not None and state.phase is ClusterPhase.READY

        await until(supervises, timeout_s=120, what="the controller supervises again")
        assert await pids(client) == before


def _take(port: int) -> socket.socket:
    """Listen on a port as soon as its owner has died."""
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))


async def lose_controller(nodes: RayNodes, run_dir: Path) -> None:
    """Have Ray give the controller up, and return when its process has ended."""
    await asyncio.to_thread(nodes.ask, f"ray.kill(ray.get_actor('{NAME}/controller'), no_restart=True)")

    async def is_gone() -> bool:
        return read_info(run_dir) is None

    await until(is_gone, timeout_s=60, what="the controller has ended")


async def test_workers_of_a_lost_controller_are_taken_over_by_up_and_removed_by_down(
    nodes: RayNodes, cluster: Cluster
) -> None:
    folder, run_dir = cluster.folder, cluster.folder / "run"
    first = read_info(run_dir)
    assert first is not None
    async with client_of(first) as client:
        before = await pids(client)
        with pytest.raises(ClusterError, match="already runs"):
            await asyncio.to_thread(bring_up, folder)
        await lose_controller(nodes, run_dir)

        second = await asyncio.to_thread(bring_up, folder)

        assert (second.address, second.pid != first.pid) == (first.address, True)
        assert await pids(client) == before
        await lose_controller(nodes, run_dir)
        removed = list[str]()
        assert await asyncio.to_thread(partial(lifecycle.down, run_dir, report=removed.append))

    assert removed[0] == "removed decode-0, prefill-0, router-0 from Ray"
    assert StateFile(run_dir).read() is None


async def test_certificates_of_a_joined_cluster_outlive_its_processes(tmp_path: Path, nodes: RayNodes) -> None:
    """A worker and the controller die; clients keep their ca.pem, and hear of nothing. `down` leaves no process."""
    with running(tmp_path, tls={"lifetime_s": _LIFETIME_S}) as info:
        ca = _ca(info)
        async with client_of(info) as client:
            shown = {await asyncio.to_thread(shown_by, info.address)}

            async def is_known() -> bool:
                return "decode-0" in await pids(client)

            await until(is_known, timeout_s=60, what="decode-0 reports to the router")  # just certified again
            before = await pids(client)
            os.kill(before["decode-0"], signal.SIGKILL)

            async def is_back() -> bool:
                return (await pids(client)).get("decode-0", before["decode-0"]) != before["decode-0"]

            await until(is_back, timeout_s=60, what="Ray's new decode-0 has its certificate")
            await kill_controller(tmp_path / "run")
            while len(shown) < _NUM_CERTIFICATES:
                async with client_of(info) as newcomer:
                    await answers(newcomer, num_tokens=NUM_TOKENS)
                shown.add(await asyncio.to_thread(shown_by, info.address))

            assert _ca(info) == ca
            await answers(client, num_tokens=NUM_TOKENS)
            assert (await client.status()).router.num_failed == 0
            after = await pids(client)
    assert nodes.ask(_NAMES) == []
    assert not any(ProcessIdentity.of(pid) for pid in after.values())


def test_up_when_a_worker_cannot_start_tells_why_and_leaves_no_actor(tmp_path: Path, nodes: RayNodes) -> None:
    one_port = GPU_POOL | {"ports": "21000-21000"}  # a worker listens on several

    with pytest.raises(ClusterError, match=r"^decode-0: .*21000"):
        bring_up(tmp_path, pools={"prefill": POOL, "decode": one_port})

    assert StateFile(tmp_path / "run").read() is None
    assert nodes.ask(_NAMES) == []
