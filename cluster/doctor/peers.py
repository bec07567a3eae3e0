"""Checks whether every worker reaches every other one, from which it may have to pull KV."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc

from cluster.doctor.finding import DoctorFinding, failure, ok, warning
from common.rpc import Connect
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc

_TIMEOUT_S = 10.0
_AT_A_TIME = 2
"""Concurrent probes by one worker, which accepts four; another doctor may run."""
_NUM_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachableWorker:
    """A worker that this host reaches, so that it can probe the others."""

    worker_id: str
    address: str
    layout: pb.KvLayout


async def check_peers(
    asked: Sequence[ReachableWorker], addresses: Mapping[str, str], connect: Connect
) -> list[DoctorFinding]:
    """Have each worker of `asked` probe `addresses`, the KV planes by worker id; return findings on the connections."""
    layouts = {each.worker_id: each.layout for each in asked}

    def is_target(source: ReachableWorker, name: str) -> bool:
        # Workers of different layouts never exchange blocks; the finding `agreement` names them.
        return name != source.worker_id and layouts.get(name, source.layout) == source.layout

    probed = await asyncio.gather(
        *(_try(each, connect, {name: at for name, at in addresses.items() if is_target(each, name)}) for each in asked)
    )
    cut_off: dict[str, list[str]] = {}
    unasked, num_tried = [], 0
    for source, answers in zip(asked, probed, strict=True):
        if any(answer is None for answer in answers.values()):
            unasked.append(source.worker_id)
        num_tried += sum(answer is not None for answer in answers.values())
        for name, answer in answers.items():
            if answer is False:
                cut_off.setdefault(name, []).append(source.worker_id)
    findings = [_cut_off(name, addresses[name], sources) for name, sources in sorted(cut_off.items())]
    if unasked:
        findings.append(
            warning(
                "worker to worker",
                f"{_named(unasked)} could not probe the others",
                "install the same version everywhere and check again whether KV gets from worker to worker",
            )
        )
    if not findings and num_tried:
        findings.append(ok("worker to worker", f"all {num_tried} connections between {len(asked)} workers work"))
    return findings


def _cut_off(name: str, address: str, sources: Sequence[str]) -> DoctorFinding:
    port = address.rpartition(":")[2]
    return failure(
        f"to {name}",
        f"{address} is not reached by {_named(sources)}",
        f"prompts are computed again instead of pulled from there: open port {port} of that host (pools.*.ports) to"
        " all hosts of the cluster, and check that its address is the one that they use",
    )


def _named(names: Sequence[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


async def _try(source: ReachableWorker, connect: Connect, targets: Mapping[str, str]) -> dict[str, bool | None]:
    """Return for each target whether the source reaches it; None if the probe failed."""
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(stub: "worker_pb2_grpc.WorkerServiceAsyncStub", name: str, address: str) -> bool | None:
        async with places:
            try:
                request = pb.ProbePeerRequest(address=address, worker_id=name)
                return bool((await stub.ProbePeer(request, timeout=_TIMEOUT_S)).reached)
            except grpc.aio.AioRpcError:
                return None

    async with connect(source.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        answers = await asyncio.gather(*(one(stub, *target) for target in targets.items()))
    return dict(zip(targets, answers, strict=True))
