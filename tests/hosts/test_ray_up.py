"""`ray up` on four hosts: workers land in their pools, strangers get nowhere, a power cut loses no answer.

`pytest tests/hosts -s` prints the log.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.errors import KvrelayError
from kvrelay.client import AsyncClient
from tests.hosts.network import Host, Journal, hosts, why_not
from tests.hosts.ports import documented_ports
from tests.hosts.ray_cluster import NAME, ROUTER_PORT, WORKER_PORTS, RayCluster
from tests.hosts.streams import describe, stream_all
from tests.hosts.trust_steps import refuse_strangers_in_mid_stream, renew_certificates_in_mid_stream

_REASON = why_not()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(_REASON is not None, reason=f"hosts out of namespaces: {_REASON}"),
    pytest.mark.timeout(500),
]

# A worker takes all of a host's cores, so that Ray puts each on a host of its own.
POOL = {
    "num_cpus": os.cpu_count(),
    "num_blocks": 2048,
    "block_size": 16,
    "max_step_tokens": 256,
    "max_running": 64,
    "ports": WORKER_PORTS,
}
_WAIT_S = 120
_LIFETIME_S = 12.0
"""Lifetime of certificates that are renewed during the test."""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Host]]:
    (tmp_path / "hosts").mkdir()
    with hosts(("head", "prefill-a", "decode-a", "decode-b"), tmp_path / "hosts") as made:
        yield made


class Site:
    """Four hosts with a cluster on them, and steps that the tests share; each tells the journal what it saw."""

    def __init__(
        self, machines: dict[str, Host], file: str, folder: Path, *, num_decode: int, tls: dict[str, Any]
    ) -> None:
        self.machines = machines
        self.pools = {"prefill": [machines["prefill-a"].address]}
        self.pools["decode"] = [machines[name].address for name in ("decode-a", "decode-b")]
        self.cluster = RayCluster(
            list(machines.values()), file=file, serving=_serving(num_decode, tls), folder=folder, pools=self.pools
        )
        self.journal = Journal(machines.values())
        self.journal.title(f"`ray up {file}`")

    @asynccontextmanager
    async def up(self, *, num_workers: int) -> AsyncIterator[AsyncClient]:
        """`ray up`, until the router uses every worker, each on a host of its pool; yields a client."""
        took_s = await asyncio.to_thread(self.cluster.up)
        self.journal.note(f"`ray up` came back after {took_s:.1f} s")
        await asyncio.to_thread(self.cluster.fetch_ca)
        async with self.cluster.client() as client:
            await self._until_whole(client, num_workers=num_workers)
            yield client

    async def _until_whole(self, client: AsyncClient, *, num_workers: int) -> None:
        where = await workers_at(client, count=num_workers)
        assert all(address in self.pools[name.partition("-")[0]] for name, address in where.items()), where
        names = self.names_of(where)
        self.journal.note(f"the router serves; {', '.join(f'{worker} on {name}' for worker, name in names.items())}")

    async def undisturbed_texts(self, client: AsyncClient) -> list[str]:
        """Stream while nothing happens and return the texts, which are the same ones ever after."""
        seen = await stream_all(client)
        self.journal.note(f"undisturbed; {describe(seen)}")
        return [each.answer.text for each in seen]

    async def cut_power_in_mid_stream(self, client: AsyncClient, texts: Sequence[str]) -> None:
        """Switch a decode host off while streams run: they go on elsewhere with the same text, and it is taken back."""
        where = await workers_at(client, count=3)
        lost = next(host for host in self.machines.values() if host.address == where["decode-0"])
        disturbed = await stream_all(client, lambda: asyncio.to_thread(lost.power_off))
        self.journal.note(f"{lost.name}, where decode-0 runs, lost its power in mid-stream; {describe(disturbed)}")
        assert [each.answer.text for each in disturbed] == list(texts)
        assert any(each.was_moved for each in disturbed), "no stream decoded on the host that lost its power"
        self.journal.note("every stream has the text that it had undisturbed")
        lost.boot()
        took_s = await self.until(lambda alive: lost.address in alive)
        assert set(await workers_at(client, count=3)) == set(where)
        self.journal.note(f"{lost.name} has power again; Ray had it back after {took_s:.1f} s, and its worker serves")

    async def take_down(self) -> None:
        """End it as the file says; nothing of it is left on any host."""
        took_s = await asyncio.to_thread(self.cluster.down)
        left = {host.name: self.cluster.leftovers(host) for host in self.machines.values() if host.is_on}
        assert not any(left.values()), left
        self.journal.note(f"`ray down` took {took_s:.1f} s; no process is left")

    async def until(self, is_so: Callable[[set[str]], bool]) -> float:
        """Wait until Ray's live hosts are as told; return how long it took, seconds."""
        started_s = time.monotonic()
        async with asyncio.timeout(_WAIT_S):
            while True:
                if is_so(await asyncio.to_thread(self.cluster.live_addresses)):
                    return time.monotonic() - started_s
                await asyncio.sleep(0.5)  # there is no event to wait for

    def names_of(self, where: dict[str, str]) -> dict[str, str]:
        """Return the hosts' names instead of their addresses."""
        by_address = {host.address: host.name for host in self.machines.values()}
        return {worker: by_address[address] for worker, address in where.items()}


async def test_fixed_hosts_serve_from_their_pools_refuse_strangers_and_survive_a_power_cut(
    machines: dict[str, Host], tmp_path: Path
) -> None:
    site = Site(machines, "cluster.yaml", tmp_path, num_decode=2, tls={"lifetime_s": _LIFETIME_S})
    of_workers = [host for host in machines.values() if host is not site.cluster.head]
    async with site.up(num_workers=3) as client:
        texts = await site.undisturbed_texts(client)
        await refuse_strangers_in_mid_stream(site.cluster, of_workers, client, site.journal, texts)
        await renew_certificates_in_mid_stream(site.cluster, of_workers, client, site.journal, texts)
        await site.cut_power_in_mid_stream(client, texts)
    await site.take_down()


async def test_typed_hosts_follow_their_pool_and_the_doctor_names_what_is_sick(
    machines: dict[str, Host], tmp_path: Path
) -> None:
    site = Site(machines, "deploy/on-premise.yaml", tmp_path, num_decode=1, tls={})
    async with site.up(num_workers=2) as client:
        spare = await host_comes_with_a_larger_pool(site)
        doctor_names_what_is_sick(site, machines[spare])
        await site.cut_power_in_mid_stream(client, await site.undisturbed_texts(client))
        known = {port for ports in documented_ports().values() for port in ports}
        unknown = {host.name: host.listening_ports() - known for host in machines.values()}
        assert not any(unknown.values()), unknown
        site.journal.note("no port is open that the documentation does not name")
        told = await asyncio.to_thread(site.cluster.kvrelay, "scale decode=1")
        site.journal.note(f"kvrelay scale decode=1\n{told}")
        took_s = await site.until(lambda alive: machines[spare].address not in alive)
        site.journal.note(f"{spare} was empty, and Ray let it go {took_s:.1f} s later")
        await workers_at(client, count=2)
    await site.take_down()


async def host_comes_with_a_larger_pool(site: Site) -> str:
    """Scale up with another version on the idle host, after a look at the healthy cluster; returns the host's name."""
    alive = await asyncio.to_thread(site.cluster.live_addresses)
    (spare,) = (host for host in site.machines.values() if host.address not in alive)
    site.journal.note(f"kvrelay doctor, all well\n{site.cluster.kvrelay('doctor')}")
    pretend_version(spare, "0.0.9")
    told = await asyncio.to_thread(site.cluster.kvrelay, "scale decode=2")
    assert spare.address in await asyncio.to_thread(site.cluster.live_addresses)
    site.journal.note(f"kvrelay scale decode=2 made {spare.name} join\n{told}")
    return spare.name


def doctor_names_what_is_sick(site: Site, spare: Host) -> None:
    """Have it find another version, a way between two workers that is closed, and a model that is missing."""
    with spare.cut_off_from(site.machines["prefill-a"]):
        told = site.cluster.kvrelay("doctor", exit_status=1)
    site.journal.note(f"kvrelay doctor, {spare.name} has another version and no way to prefill-a\n{without_ok(told)}")
    for finding in ("runs kvrelay 0.0.9", "is not reached by decode-1", "is not reached by prefill-0"):
        assert finding in told
    told = site.cluster.doctor_of_hosts()
    site.journal.note(f"kvrelay doctor --hosts cluster.yaml, from the client's machine\n{told}")
    assert f"{spare.address} has 0.0.9" in told
    lacking = "model: {id: models/lacking, local_files_only: true}"
    spare.run(f"echo '{lacking}' >~/kvrelay/lacking.yaml")
    told = site.cluster.kvrelay("doctor --host-only --config lacking.yaml", at=spare, exit_status=1)
    site.journal.note(f"kvrelay doctor --host-only on {spare.name}, whose model is missing\n{without_ok(told)}")
    assert "models/lacking" in told


def without_ok(told: str) -> str:
    """Return what a doctor says, less what is well."""
    return "\n".join(line for line in told.splitlines() if not line.startswith("ok "))


def pretend_version(host: Host, version: str) -> None:
    """Let the host's packages say that it has another version of kvrelay."""
    metadata = f"Metadata-Version: 2.1\\nName: kvrelay\\nVersion: {version}\\n"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = f"~/kvrelay/.venv/lib/{python}/site-packages/kvrelay-{version}.dist-info"
    host.run(f"mkdir -p {folder} && printf '{metadata}' >{folder}/METADATA")


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


def _serving(num_decode: int, tls: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": NAME,
        "launcher": "ray",
        "model": {"engine": "fake", "fake_step_ms": 20.0, "max_model_len": 4096},
        "pools": {"prefill": {"count": 1, **POOL}, "decode": {"count": num_decode, **POOL}},
        "router": {
            "host": "0.0.0.0",
            "port": ROUTER_PORT,
            "http_port": 8000,
            "metrics_port": 9100,
            "admin_port": 9200,
            "policy": "least_load",
            "local_prefill_max_tokens": 0,
        },
        "tls": tls,
    }
