"""Steps on a cluster that serves: strangers try everything, and certificates change, while clients stream."""

import asyncio
from collections.abc import Collection

from common.trust.identity import Role
from kvrelay.client import AsyncClient
from tests.e2e.streams import answers, running_streams
from tests.hosts.certificates import watched
from tests.hosts.network import Host
from tests.hosts.ports import documented_ports
from tests.hosts.ray_cluster import NAME, RayCluster
from tests.hosts.site import NUM_TOKENS, Site
from tests.hosts.strangers import INSIDE_METHODS, intrusions, open_doors

_WAIT_S = 120
_NUM_CERTIFICATES = 2
"""The present one and its successor."""
_NUM_EACH = 2
"""Streams of each client at a time."""


class Listeners:
    """Listeners of a cluster's processes, as a port scan finds them."""

    def __init__(self, cluster: RayCluster, hosts: Collection[Host]) -> None:
        """`hosts` run workers."""
        ports = {setting: at.start for setting, at in documented_ports().items() if "router." in setting}
        at_head = {setting.strip("`").removeprefix("router."): port for setting, port in ports.items()}
        self.router = {name: f"{cluster.head.address}:{port}" for name, port in at_head.items()}
        in_range = documented_ports()["`pools.*.ports`"]
        self.workers = [
            f"{host.address}:{port}" for host in hosts for port in sorted(host.listening_ports()) if port in in_range
        ]

    @property
    def owners(self) -> dict[str, Role]:
        """Every listener and whose it is."""
        return dict.fromkeys(self.router.values(), Role.ROUTER) | dict.fromkeys(self.workers, Role.WORKER)


async def refuse_strangers_in_mid_stream(site: Site, client: AsyncClient) -> None:
    """Call every method from a stranger host while streams run: each is refused, and no stream is disturbed."""
    ca = site.cluster.ca
    at = await asyncio.to_thread(Listeners, site.cluster, site.others)
    before = await client.status()
    async with running_streams(client, num_tokens=NUM_TOKENS):
        let_in = await intrusions(at.owners, ca=ca, cluster=NAME)
        let_in += await open_doors(at.router["port"], at.router["http_port"])
    assert not let_in
    site.journal.note(
        f"a host that is no member tried {len(INSIDE_METHODS)} methods on {len(at.owners)} listeners in mid-stream"
    )
    after = await client.status()
    assert after.router.num_failed == 0
    assert [(each.worker_id, each.role, each.state) for each in after.workers] == [
        (each.worker_id, each.role, each.state) for each in before.workers
    ]


async def renew_certificates_in_mid_stream(site: Site, client: AsyncClient) -> None:
    """Stream until every listener has changed its certificate: texts stay the same, and newcomers get in."""
    at = await asyncio.to_thread(Listeners, site.cluster, site.others)
    num_streams = 0
    num_failed = (await client.status()).router.num_failed
    async with watched(at.owners) as serials, asyncio.timeout(_WAIT_S):
        while min(len(each) for each in serials.values()) < _NUM_CERTIFICATES:
            async with site.cluster.client() as newcomer:
                both = (client, newcomer)
                await asyncio.gather(*(answers(each, num_tokens=NUM_TOKENS, num_streams=_NUM_EACH) for each in both))
            num_streams += 2 * _NUM_EACH
    assert (await client.status()).router.num_failed == num_failed
    site.journal.note(
        f"{len(at.owners)} listeners changed their certificates; {num_streams} streams meanwhile, 0 failed"
    )
