"""Steps on a cluster that serves: strangers try everything, and certificates change, while clients stream."""

import asyncio
from collections.abc import Collection

from common.trust.identity import Role
from kvrelay.client import AsyncClient
from tests.hosts import strangers
from tests.hosts.certificates import watched
from tests.hosts.network import Host
from tests.hosts.ports import documented_ports
from tests.hosts.ray_cluster import NAME, RayCluster
from tests.hosts.site import Site
from tests.hosts.strangers import (
    INSIDE_METHODS,
    Attempt,
    call_everything,
    knock_without_trust,
    stream_with_made_up_capability,
)
from tests.hosts.streams import describe, stream_all

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
    attempts: list[Attempt] = []

    async def attack() -> None:
        attempts.extend(await call_everything(at.owners, ca=ca, cluster=NAME))
        attempts.extend(await stream_with_made_up_capability(at.workers, ca=ca, cluster=NAME))
        attempts.extend(await knock_without_trust(at.router["port"], at.router["http_port"]))

    seen = await stream_all(client, attack)
    site.journal.note(
        f"{len(attempts)} attempts by a host that is no member, of {len(INSIDE_METHODS)} methods on"
        f" {len(at.owners)} listeners\n{strangers.describe(attempts)}"
    )
    site.journal.note(f"meanwhile {describe(seen)}")
    assert not [each for each in attempts if each.was_let_in]
    assert [each.answer.text for each in seen] == site.texts
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
                both = await asyncio.gather(*(stream_all(each, num_streams=_NUM_EACH) for each in (client, newcomer)))
            assert [[each.answer.text for each in seen] for seen in both] == [site.texts[:_NUM_EACH]] * 2
            num_streams += 2 * _NUM_EACH
    assert (await client.status()).router.num_failed == num_failed
    site.journal.note(
        f"{len(at.owners)} listeners changed their certificates; {num_streams} streams"
        " meanwhile, 0 failed, 0 texts differ"
    )
