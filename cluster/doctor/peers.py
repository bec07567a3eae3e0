"""Checks whether every worker reaches every other one, from which it may have to pull KV."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from cluster.doctor.finding import DoctorFinding, failure, ok, warning
from common.rpc import Connect
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc

_TIMEOUT_S = 10.0
_AT_A_TIME = 2
"""Concurrent probes by one worker, which accepts four; another doctor may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachableWorker:
    """A worker that this host reaches, so that it can probe the others."""

    worker_id: str
    address: str
    kv_address: str
    """Where the others pull from it."""


async def check_peers(workers: Sequence[ReachableWorker], connect: Connect) -> list[DoctorFinding]:
    """Have each worker probe the others; return findings on the connections."""
    reached = await asyncio.gather(*(_probe(each, workers, connect) for each in workers))
    answers = {each.worker_id: found for each, found in zip(workers, reached, strict=True)}
    findings = []
    for target in workers:
        sources = [name for name, found in answers.items() if found.get(target.worker_id) is False]
        if sources:
            findings.append(_cut_off(target, sources))
    if unasked := [name for name, found in answers.items() if None in found.values()]:
        advice = "install the same version everywhere and check again whether KV gets from worker to worker"
        findings.append(warning("worker to worker", f"{', '.join(unasked)} could not probe the others", advice))
    if not findings and (num_tried := sum(map(len, reached))):
        findings.append(ok("worker to worker", f"all {num_tried} connections between {len(workers)} workers work"))
    return findings


def _cut_off(target: ReachableWorker, sources: Sequence[str]) -> DoctorFinding:
    port = target.kv_address.rpartition(":")[2]
    return failure(
        f"to {target.worker_id}",
        f"{target.kv_address} is not reached by {', '.join(sources)}",
        f"prompts are computed again instead of pulled from there: open port {port} of that host (pools.*.ports) to"
        " all hosts of the cluster, and check that its address is the one that they use",
    )


async def _probe(
    source: ReachableWorker, workers: Sequence[ReachableWorker], connect: Connect
) -> dict[str, bool | None]:
    """Return for each other worker whether the source reaches it; None if the probe failed."""
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(stub: "worker_pb2_grpc.WorkerServiceAsyncStub", target: ReachableWorker) -> bool | None:
        request = pb.ProbePeerRequest(address=target.kv_address, worker_id=target.worker_id)
        async with places:
            try:
                return bool((await stub.ProbePeer(request, timeout=_TIMEOUT_S)).reached)
            except grpc.aio.AioRpcError:
                return None

    others = [each for each in workers if each is not source]
    async with connect(source.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        found = await asyncio.gather(*(one(stub, target) for target in others))
    return {target.worker_id: each for target, each in zip(others, found, strict=True)}
