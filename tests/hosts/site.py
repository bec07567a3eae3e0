"""A cluster on four hosts, and the steps that the tests share; each step tells the journal what it saw."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from common.errors import KvrelayError
from kvrelay.client import AsyncClient
from tests.e2e.streams import running_streams
from tests.hosts.network import Host, Journal, hosts
from tests.hosts.ray_cluster import NAME, ROUTER_PORT, WORKER_PORTS, RayCluster, logs_of, until_ray

_HOSTS = {"prefill": ("prefill-a",), "decode": ("decode-a", "decode-b")}
"""Hosts of each pool; the head is a host of its own."""
# A worker takes all of a host's cores, so that Ray puts each on a host of its own.
_POOL = {
    "num_cpus": os.cpu_count(),
    "num_blocks": 2048,
    "block_size": 16,
    "max_step_tokens": 256,
    "max_running": 64,
    "ports": WORKER_PORTS,
}
_WAIT_S = 180
NUM_TOKENS = 75
"""Tokens of an answer, which lasts for seconds."""


class Site:
    """Four hosts with a cluster on them."""

    def __init__(
        self, machines: dict[str, Host], file: str, folder: Path, *, num_decode: int, changes: dict[str, Any]
    ) -> None:
        """`file`: in this repository; `changes` overwrite keys of the configuration's sections."""
        self.machines = machines
        self.head, *self.others = machines.values()
        self.pools = {pool: [machines[name].address for name in names] for pool, names in _HOSTS.items()}
        self.num_workers = 1 + num_decode
        serving = _serving(num_decode)
        for section, keys in changes.items():
            serving[section] = serving.get(section, {}) | keys
        self.cluster = RayCluster(list(machines.values()), file=file, serving=serving, folder=folder, pools=self.pools)
        self.journal = Journal(f"`ray up {file}`")

    def ray_up(self) -> None:
        """Start it, and fetch what its clients trust."""
        took_s = self.cluster.up()
        self.journal.note(f"`ray up` came back after {took_s:.1f} s")
        self.cluster.fetch_ca()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        """Yield a client of the head's router, once it uses every worker."""
        async with self.cluster.client() as client:
            try:
                where = await workers_at(client, count=self.num_workers)
            except TimeoutError:
                raise AssertionError(f"no complete cluster after {_WAIT_S} s\n{logs_of(self.head)}") from None
            assert all(address in self.pools[name.partition("-")[0]] for name, address in where.items()), where
            names = ", ".join(f"{worker} on {name}" for worker, name in self._names_of(where).items())
            self.journal.note(f"the router serves; {names}")
            yield client

    async def cut_power_in_mid_stream(self, client: AsyncClient) -> None:
        """Switch a decode host off while streams run: they go on elsewhere with the same text, and it is taken back."""
        where = await workers_at(client, count=3)
        lost = next(host for host in self.others if host.address == where["decode-0"])
        async with running_streams(client, num_tokens=NUM_TOKENS) as running:
            await asyncio.to_thread(lost.power_off)
        num_moved = sum(len(task.result().plans) > 1 for task in running)
        assert num_moved, "no stream decoded on the host that lost its power"
        self.journal.note(f"{lost.name}, where decode-0 runs, lost its power in mid-stream; {num_moved} streams moved")
        lost.boot()
        took_s = await asyncio.to_thread(until_ray, lost, runs=True)
        assert set(await workers_at(client, count=3)) == set(where)
        self.journal.note(f"{lost.name} has power again; its raylet ran after {took_s:.1f} s, and its worker serves")

    def ray_down(self) -> None:
        """End it as the file says; nothing of it is left on any host."""
        took_s = self.cluster.down()
        left = {host.name: self.cluster.leftovers(host) for host in self.machines.values() if host.is_on}
        assert not any(left.values()), left
        self.journal.note(f"`ray down` took {took_s:.1f} s; no process is left")

    def _names_of(self, where: dict[str, str]) -> dict[str, str]:
        """Return the hosts' names instead of their addresses."""
        by_address = {host.address: host.name for host in self.machines.values()}
        return {worker: by_address[address] for worker, address in where.items()}


@contextmanager
def site_on(file: str, folder: Path, *, num_decode: int, **changes: dict[str, Any]) -> Iterator[Site]:
    """Yield a cluster that `ray up FILE` has started on hosts of its own, which are switched off at the end."""
    (folder / "hosts").mkdir()
    with hosts(("head", *(name for names in _HOSTS.values() for name in names)), folder / "hosts") as machines:
        site = Site(machines, file, folder, num_decode=num_decode, changes=changes)
        site.ray_up()
        yield site


async def workers_at(client: AsyncClient, *, count: int) -> dict[str, str]:
    """Wait until so many workers are ready, and return their hosts' addresses."""
    async with asyncio.timeout(_WAIT_S):
        while True:
            try:
                views = (await client.status()).workers
            except KvrelayError:
                views = ()
            if sum(view.state == "ready" for view in views) == count:
                return {view.worker_id: view.address.rpartition(":")[0] for view in views}
            await asyncio.sleep(0.5)  # there is no event for a complete cluster


def _serving(num_decode: int) -> dict[str, Any]:
    return {
        "name": NAME,
        "launcher": "ray",
        "model": {"engine": "fake", "fake_step_ms": 80.0, "max_model_len": 4096},
        "pools": {"prefill": {"count": 1, **_POOL}, "decode": {"count": num_decode, **_POOL}},
        "router": {
            "host": "0.0.0.0",
            "port": ROUTER_PORT,
            "http_port": 8000,
            "metrics_port": 9100,
            "admin_port": 9200,
            "policy": "least_load",
            "local_prefill_max_tokens": 0,
        },
    }
