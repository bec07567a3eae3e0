"""Checks whether a running cluster works together, as seen from this host."""

import asyncio
import time
from collections.abc import Callable, Mapping

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
            status = await client.status()
    except Unreachable as error:
        advice = "start it with `kvrelay up`; on another host, open its port in the firewall, and router.host: 0.0.0.0"
        return [failure("router", error.message, advice)]
    except KvrelayError as error:
        return [failure("router", f"{address}: {error.message}", "see `kvrelay logs router`")]
    advice = "answers take longer than they could: see docs/diagnosis.md, “Alarms”"
    findings = [
        ok("router", f"{address} answers"),
        *(warning("alarm", each, advice) for each in status.router.alarms),
    ]
    findings += [] if config is None else _pools(status, config)
    if operator is None:
        advice = "run this on the host of `kvrelay up` as its user, or copy its run folder's tls/operator.json here"
        return [*findings, warning("workers", "not asked: they answer operators only", advice)]
    doors = {f"the router at {each}": each for each in routers}
    certificates = await check_certificates(doors | {each.worker_id: each.address for each in status.workers}, operator)
    connect = connect_to(Role.WORKER, operator)
    asked = await asyncio.gather(*(_ask(view, connect) for view in status.workers))
    between = await check_peers([worker for _, worker in asked if worker is not None], connect)
    return [*findings, *certificates, *(finding for finding, _ in asked), *between]


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


async def _ask(view: WorkerView, connect: Connect) -> tuple[DoctorFinding, ReachableWorker | None]:
    """Describe a worker as seen from this host; also return it if it answers and no router refuses it."""
    name, address = view.worker_id, view.address
    started_s = time.monotonic()
    async with connect(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            described = await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            cause = f"{error.code().name.lower()}: {error.details()}"
            detail = f"{address} cannot be reached from this host ({cause}); the router says: {view.state}"
            port = address.rpartition(":")[2]
            advice = f"open port {port} of that host to all others: workers pull KV from each other"
            return failure(name, detail, advice), None
        round_trip_s = time.monotonic() - started_s
        skew_s = described.unix_time_s - time.time() + round_trip_s / 2
    if view.state.startswith("refused"):  # with the reason: other weights, blocks or texts, so that none pulls from it
        return failure(name, f"{address} is {view.state}", "put the same files and version on every host"), None
    reached = ReachableWorker(worker_id=name, address=address, kv_address=with_port(address, described.kv_port))
    ours = installed_version()
    if view.state != "ready":
        finding = failure(name, f"{address} is {view.state}", f"see `kvrelay logs {name}`")
    elif described.version != ours:
        theirs = described.version or "of an unknown version"
        advice = "they may not understand each other: install the same version on every host and restart that worker"
        finding = failure(name, f"{address} runs kvrelay {theirs}; this host has {ours}", advice)
    elif abs(skew_s) > _MAX_SKEW_S + round_trip_s / 2:
        detail = f"the clock of {address} is {abs(skew_s):.1f} s {'ahead' if skew_s > 0 else 'behind'}"
        finding = warning(name, detail, "use NTP on every host: logs and traces cannot be put in order")
    else:
        finding = ok(name, f"{address} answers in {1000 * round_trip_s:.1f} ms, kvrelay {described.version}")
    return finding, reached


async def check_certificates(addresses: Mapping[str, str], operator: Credentials) -> list[DoctorFinding]:
    """Return the processes, by name in `addresses`, whose certificates will soon expire or have expired."""
    now_s, renewed_s = time.time(), _LATE_SHARE * operator.held.enrolment.lifetime_s
    # For each process the seconds that are left, and the fewest that are good.
    left = {"the operator": (operator.held.validity.ends_unix_s - now_s, renewed_s)}
    if operator.is_encrypted:
        inspector = CertificateInspector(operator)
        shown = await asyncio.gather(*(inspector.inspect(address) for address in addresses.values()))
        for name, certificate in zip(addresses, shown, strict=True):
            if certificate is not None:  # else it is unreachable, which other checks report
                left[name] = (certificate.expires_unix_s - now_s, renewed_s if certificate.is_issued else _LATE_OWN_S)
    late = [_late(name, left_s) for name, (left_s, least_s) in left.items() if left_s < least_s]
    return late or [ok("certificates", f"{len(left)} are good for {_span(min(left.values())[0])} or longer")]


def _late(name: str, left_s: float) -> DoctorFinding:
    advice = "the controller renews it while it runs: see `kvrelay logs supervisor`; own files: replace them"
    if left_s <= 0:
        return failure("certificates", f"that of {name} expired {_span(-left_s)} ago: no new connections", advice)
    return warning("certificates", f"that of {name} expires in {_span(left_s)} and was not renewed", advice)


def _span(seconds: float) -> str:
    for unit, length_s in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"
