"""Checks whether a running cluster works together, as seen from this host."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from cluster.doctor.finding import DoctorFinding, failure, ok, warning
from cluster.doctor.peers import ReachableWorker, check_peers
from common.config import ServingConfig
from common.errors import KvrelayError, Unreachable
from common.ports import with_port
from common.rpc import Connect
from common.trust.authority import RENEW_SHARE
from common.trust.channels import connect_to
from common.trust.credentials import Credentials
from common.trust.doors import CertificateInspector
from common.trust.identity import Role
from common.version import installed_version
from kvrelay.client import AsyncClient, ClusterStatus, WorkerView
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 5.0
_MAX_SKEW_S = 1.0
_LATE_SHARE = (1 - RENEW_SHARE) * 3 / 4
"""Remaining share of a certificate's life below which its renewal is overdue."""
_LATE_OWN_S = 7 * 86_400.0
"""Remaining life below which the operator's own certificate should be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """A worker that was asked directly."""

    view: WorkerView
    described: worker_pb2.DescribeWorkerResponse | None
    error: str
    round_trip_s: float
    skew_s: float
    """Its clock minus that of this host, minus half the round trip."""


async def check_service(
    make_client: Callable[..., AsyncClient], config: ServingConfig | None, *, operator: Credentials | None
) -> list[DoctorFinding]:
    """Return findings about the cluster behind a client's router.

    Without `config` the pools are not compared with it; without the credentials of an operator no worker is asked.
    """
    address = ""
    try:
        async with make_client(timeout_s=_TIMEOUT_S) as client:
            address, routers = client.address, client.addresses
            started_s = time.monotonic()
            status = await client.status()
            answered = ok("router", f"{address} answers in {_ms(time.monotonic() - started_s)}")
    except Unreachable as error:
        advice = "start it with `kvrelay up`; on another host, open its port in the firewall, and router.host: 0.0.0.0"
        return [failure("router", error.message, advice)]
    except KvrelayError as error:
        return [failure("router", f"{address}: {error.message}", "see `kvrelay logs router`")]
    advice = "routing is worse than it could be: see docs/diagnosis.md, “Alarms”"
    alarms = [warning("routing", alarm, advice) for alarm in status.router.alarms]
    pools = [] if config is None else _pools(status, config)
    if operator is None:
        advice = "run this on the host of `kvrelay up` as its user, or copy its run folder's tls/operator.json here"
        return [answered, *alarms, *pools, warning("workers", "not asked: they answer operators only", advice)]
    doors = {f"the router at {each}": each for each in routers}
    workers = {view.worker_id: view.address for view in status.workers}
    certificates = await check_certificates(doors | workers, operator)
    connect = connect_to(Role.WORKER, operator)
    peers = await asyncio.gather(*(_ask(view, connect) for view in status.workers))
    reached = [
        ReachableWorker(worker_id=peer.view.worker_id, address=peer.view.address, layout=peer.described.layout)
        for peer in peers
        if peer.described is not None
    ]
    targets = {
        peer.view.worker_id: with_port(peer.view.address, peer.described.kv_port)
        for peer in peers
        if peer.described is not None
    }
    between = await check_peers(reached, targets, connect)
    asked = [*(_worker(peer) for peer in peers), *_agreement(peers), *between]
    return [answered, *alarms, *pools, *certificates, *asked]


def _pools(status: ClusterStatus, config: ServingConfig) -> list[DoctorFinding]:
    findings = []
    for role, pool in (("prefill", config.pools.prefill), ("decode", config.pools.decode)):
        num_ready = sum(view.role == role and view.state == "ready" for view in status.workers)
        text = f"{num_ready} workers ready, {pool.count} in serving.yaml"
        if num_ready >= pool.count:
            findings.append(ok(f"{role} pool", text))
        elif num_ready or role == "prefill":
            findings.append(warning(f"{role} pool", text, f"see `kvrelay logs {role}-0` and the workers below"))
        else:
            findings.append(failure(f"{role} pool", text, "nothing can be answered: see `kvrelay logs decode-0`"))
    return findings


async def _ask(view: WorkerView, connect: Connect) -> _Peer:
    """Describe a worker as seen from this host."""
    started_s = time.monotonic()
    described, error, skew_s = None, "", 0.0
    async with connect(view.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            described = await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as failed:
            error = f"{failed.code().name.lower()}: {failed.details()}"
        round_trip_s = time.monotonic() - started_s
        if described is not None:
            skew_s = described.unix_time_s - time.time() + round_trip_s / 2
    return _Peer(view=view, described=described, error=error, round_trip_s=round_trip_s, skew_s=skew_s)


def _worker(peer: _Peer) -> DoctorFinding:
    view, described = peer.view, peer.described
    name = view.worker_id
    if described is None:
        return failure(
            name,
            f"{view.address} cannot be reached from this host ({peer.error}); the router says: {view.state}",
            f"open port {view.address.rpartition(':')[2]} of that host to all others: workers pull KV from each other",
        )
    if view.state != "ready":
        return failure(name, f"{view.address} is {view.state}", f"see `kvrelay logs {name}`")
    ours = installed_version()
    if described.version != ours:
        return failure(
            name,
            f"{view.address} runs kvrelay {described.version or 'of an unknown version'}; this host has {ours}",
            "they may not understand each other: install the same version on every host and restart that worker",
        )
    if abs(peer.skew_s) > _MAX_SKEW_S + peer.round_trip_s / 2:
        return warning(
            name,
            f"the clock of {view.address} is {abs(peer.skew_s):.1f} s {'ahead' if peer.skew_s > 0 else 'behind'}",
            "use NTP on every host: logs and traces cannot be put in order",
        )
    return ok(name, f"{view.address} answers in {_ms(peer.round_trip_s)}, kvrelay {described.version}")


def _agreement(peers: Sequence[_Peer]) -> list[DoctorFinding]:
    """Compare the weights and block shapes of all workers."""
    layouts = {peer.view.worker_id: peer.described.layout for peer in peers if peer.described is not None}
    prints = Counter(f"{layout.fingerprint}/{layout.block_size}/{layout.dtype}" for layout in layouts.values())
    if len(prints) <= 1:
        return [ok("agreement", f"{len(layouts)} workers have the same weights and blocks")] if layouts else []
    (usual, _), *_rest = prints.most_common()
    odd = [
        name for name, layout in layouts.items() if f"{layout.fingerprint}/{layout.block_size}/{layout.dtype}" != usual
    ]
    return [
        failure(
            "agreement",
            f"{', '.join(odd)}: different weights, dtype or block size",
            "they cannot exchange KV with the others: put the same model files on every host and restart them",
        )
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


async def check_certificates(addresses: Mapping[str, str], operator: Credentials) -> list[DoctorFinding]:
    """Return the processes, by name in `addresses`, whose certificates will soon expire or have expired."""
    lifetime_s, now_s = operator.held.enrolment.lifetime_s, time.time()
    left_s = {"the operator": operator.held.validity.ends_unix_s - now_s}
    late = [*_late("the operator", left_s["the operator"], _LATE_SHARE * lifetime_s)]
    if operator.is_encrypted:
        inspector = CertificateInspector(operator)
        shown = await asyncio.gather(*(inspector.inspect(address) for address in addresses.values()))
        for name, certificate in zip(addresses, shown, strict=True):
            if certificate is not None:  # else it is unreachable, which other checks report
                left_s[name] = certificate.expires_unix_s - now_s
                allowed_s = _LATE_SHARE * lifetime_s if certificate.is_issued else _LATE_OWN_S
                late += _late(name, left_s[name], allowed_s)
    return late or [ok("certificates", f"{len(left_s)} are good for {_span(min(left_s.values()))} or longer")]


def _late(name: str, left_s: float, allowed_s: float) -> list[DoctorFinding]:
    if left_s >= allowed_s:
        return []
    advice = "the controller renews it while it runs: see `kvrelay logs supervisor`; own files: replace them"
    if left_s <= 0:
        return [failure("certificates", f"that of {name} expired {_span(-left_s)} ago: no new connections", advice)]
    return [warning("certificates", f"that of {name} expires in {_span(left_s)} and was not renewed", advice)]


def _span(seconds: float) -> str:
    for unit, length_s in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"
