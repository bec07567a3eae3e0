"""Hosts that join and leave with their pool: `ray up deploy/on-premise.yaml`.

`pytest tests/hosts -s` prints the log.
"""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.hosts.network import Host, why_not
from tests.hosts.ports import documented_ports
from tests.hosts.ray_cluster import runs_ray, until_ray
from tests.hosts.site import Site, site_on, workers_at
from tests.hosts.trust_steps import renew_certificates_in_mid_stream

_REASON = why_not()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(_REASON is not None, reason=f"hosts out of namespaces: {_REASON}"),
    pytest.mark.timeout(900),
]

_LIFETIME_S = 24.0
"""Lifetime of certificates, which are renewed during the test."""


async def test_typed_hosts_follow_their_pool_and_the_doctor_names_what_is_sick(tmp_path: Path) -> None:
    with site_on("deploy/on-premise.yaml", tmp_path, num_decode=1, tls={"lifetime_s": _LIFETIME_S}) as site:
        async with site.client() as client:
            spare = await host_comes_with_a_larger_pool(site)
            doctor_names_what_is_sick(site, spare)
            await renew_certificates_in_mid_stream(site, client)
            await site.cut_power_in_mid_stream(client)
            known = {port for ports in documented_ports().values() for port in ports}
            unknown = {host.name: host.listening_ports() - known for host in site.machines.values()}
            assert not any(unknown.values()), unknown
            site.journal.note("no port is open that the documentation does not name")
            told = await asyncio.to_thread(site.cluster.kvrelay, "scale decode=1")
            site.journal.note(f"kvrelay scale decode=1\n{told}")
            took_s = await asyncio.to_thread(until_ray, spare, runs=False)
            site.journal.note(f"{spare.name} was empty, and its raylet ended {took_s:.1f} s later")
            await workers_at(client, count=2)
        await asyncio.to_thread(site.ray_down)


async def host_comes_with_a_larger_pool(site: Site) -> Host:
    """Scale up with another version on the idle host, after a look at the healthy cluster; returns the host."""
    (spare,) = (host for host in site.machines.values() if not runs_ray(host))
    site.journal.note(f"kvrelay doctor, all well\n{site.cluster.kvrelay('doctor')}")
    pretend_version(spare, "0.0.9")
    told = await asyncio.to_thread(site.cluster.kvrelay, "scale decode=2")
    assert runs_ray(spare)
    site.journal.note(f"kvrelay scale decode=2 made {spare.name} join\n{told}")
    return spare


def doctor_names_what_is_sick(site: Site, spare: Host) -> None:
    """Have it find another version, a way between two workers that is closed, and a model that is missing."""
    with spare.cut_off_from(site.machines["prefill-a"]):
        told = site.cluster.kvrelay("doctor", exit_status=1)
    site.journal.note(f"kvrelay doctor, {spare.name} has another version and no way to prefill-a\n{without_ok(told)}")
    for finding in ("runs kvrelay 0.0.9", "is not reached by decode-1", "is not reached by prefill-0"):
        assert finding in told
    told = site.cluster.doctor_of_hosts()
    site.journal.note(f"kvrelay doctor --hosts cluster.yaml, from the client's machine\n{told}")
    assert f"{spare.address} has kvrelay 0.0.9" in told
    missing = "model: {id: models/missing, local_files_only: true}"
    spare.run(f"echo '{missing}' >~/kvrelay/missing.yaml")
    told = site.cluster.kvrelay("doctor --host-only --config missing.yaml", at=spare, exit_status=1)
    site.journal.note(f"kvrelay doctor --host-only on {spare.name}, whose model is missing\n{without_ok(told)}")
    assert "models/missing" in told


def without_ok(told: str) -> str:
    """Return what a doctor says, less what is well."""
    return "\n".join(line for line in told.splitlines() if not line.startswith("ok "))


def pretend_version(host: Host, version: str) -> None:
    """Let the host's packages say that it has another version of kvrelay."""
    metadata = f"Metadata-Version: 2.1\\nName: kvrelay\\nVersion: {version}\\n"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = f"~/kvrelay/.venv/lib/{python}/site-packages/kvrelay-{version}.dist-info"
    host.run(f"mkdir -p {folder} && printf '{metadata}' >{folder}/METADATA")
