"""`ray up cluster.yaml` on four hosts: workers land in their pools, and a power cut costs nobody an answer."""

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import KvrelayError
from kvrelay.client import AsyncClient, Generation
from tests.hosts.network import Host, hosts, why_not
from tests.hosts.ray_cluster import RayCluster

logger = logging.getLogger(__name__)
_REASON = why_not()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(_REASON is not None, reason=f"hosts out of namespaces: {_REASON}"),
    pytest.mark.timeout(400),
]

NUM_STREAMS = 8
NUM_TOKENS = 400
# A worker takes all of a host's cores, so that Ray puts each on a host of its own.
POOL = {"num_cpus": os.cpu_count(), "num_blocks": 2048, "block_size": 16, "max_step_tokens": 256, "max_running": 64}
SERVING: dict[str, Any] = {
    "name": "hosts",
    "launcher": "ray",
    "model": {"engine": "fake", "fake_step_ms": 20.0, "max_model_len": 4096},
    "pools": {"prefill": {"count": 1, **POOL}, "decode": {"count": 2, **POOL}},
    "router": {"host": "0.0.0.0", "port": 50051, "policy": "least_load", "local_prefill_max_tokens": 0},
}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Host]]:
    (tmp_path / "hosts").mkdir()
    with hosts(("head", "prefill-a", "decode-a", "decode-b"), tmp_path / "hosts") as made:
        made["prefill-a"].run("true")
        yield made


@pytest.mark.parametrize("file", ["cluster.yaml", "deploy/on-premise.yaml"])
async def test_ray_up_serves_from_pools_on_hosts_and_survives_a_power_cut(
    machines: dict[str, Host], tmp_path: Path, file: str
) -> None:
    pools = {"prefill": [machines["prefill-a"].address]}
    pools["decode"] = [machines[name].address for name in ("decode-a", "decode-b")]
    cluster = RayCluster(list(machines.values()), file=file, serving=SERVING, folder=tmp_path, pools=pools)
    logger.info("`ray up` took %.1f s", await asyncio.to_thread(cluster.up))
    async with AsyncClient(cluster.address, timeout_s=120) as client:
        where = await _workers_at(client, count=3)
        logger.info("workers are at %s", where)
        assert where["prefill-0"] in pools["prefill"]
        assert {where["decode-0"], where["decode-1"]} == set(pools["decode"])

        undisturbed = await asyncio.gather(*(_answer(client, number) for number in range(NUM_STREAMS)))
        lost = next(host for host in machines.values() if host.address == where["decode-0"])
        disturbed = await _answers_while(client, lost)

        assert [each.text for each in disturbed] == [each.text for each in undisturbed]
        num_moved = sum(len(each.plans) > 1 for each in disturbed)
        logger.info("%d streams went on elsewhere", num_moved)
        assert num_moved > 0, "nobody decoded on the host that lost its power"

        lost.boot()
        logger.info("the host is back after %.1f s", await _until_alive(cluster, lost.address))
        again = await _workers_at(client, count=3)
        assert set(again) == set(where)

    logger.info("`ray down` took %.1f s", await asyncio.to_thread(cluster.down))
    left = {host.name: cluster.leftovers(host) for host in machines.values()}
    assert not any(left.values()), left


async def _workers_at(client: AsyncClient, *, count: int) -> dict[str, str]:
    """Wait until so many workers are ready, and return their hosts' addresses."""
    async with asyncio.timeout(120):
        while True:
            try:
                views = (await client.status()).workers
            except KvrelayError:
                views = ()
            if sum(view.state == "ready" for view in views) == count:
                return {view.worker_id: view.address.rpartition(":")[0] for view in views}
            await asyncio.sleep(0.5)  # nobody tells when a cluster is complete


async def _answer(client: AsyncClient, number: int) -> Generation:
    return await client.generate(_prompt(number), max_tokens=NUM_TOKENS, ignore_eos=True, seed=number)


async def _answers_while(client: AsyncClient, lost: Host) -> list[Generation]:
    """Return the same answers, during which a host loses its power: as soon as every stream has some tokens."""
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]

    async def stream(number: int) -> Generation:
        async with client.stream(_prompt(number), max_tokens=NUM_TOKENS, ignore_eos=True, seed=number) as events:
            num_events = 0
            async for _ in events:
                num_events += 1
                if num_events == 20:
                    begun[number].set()
            return await events.result()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(number)) for number in range(NUM_STREAMS)]
        for event in begun:
            await event.wait()
        await asyncio.to_thread(lost.power_off)
    return [task.result() for task in tasks]


def _prompt(number: int) -> str:
    return f"stream {number}: " + "what a host forgets, another one computes again; " * 4


async def _until_alive(cluster: RayCluster, address: str) -> float:
    """Wait until Ray has a host again; return how long it took, seconds."""
    started_s = time.monotonic()
    async with asyncio.timeout(120):
        while True:
            if address in await asyncio.to_thread(cluster.live_addresses):
                break
            await asyncio.sleep(1)  # nobody tells
    return time.monotonic() - started_s
