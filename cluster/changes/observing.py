"""Gathers a planner's observation: the routers' reports, the cluster's processes, and the times that changes took."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from cluster.changes.scaling import Scaler
from cluster.planner.plan import Observation, ObservedWorker, Pool, WorkerPhase
from cluster.processes.plan import ProcessRole
from cluster.processes.workforce import Workforce
from common.demand import Demand, demand_from_proto, merge_demands
from common.ids import WorkerId
from common.rpc import Connect
from common.timing import timing_from_proto
from kvrelay.v1 import router_admin_pb2, router_admin_pb2_grpc

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReports:
    """The reports of all routers, merged."""

    demand: Demand
    conditions: Mapping[str, router_admin_pb2.WorkerCondition]
    """Conditions of the workers by worker id."""


Ask = Callable[[float], Awaitable[RouterReports | None]]
"""Returns the reports on the last seconds, as many as given; None unless all routers answer."""


async def ask_routers(
    window_s: float, *, addresses: Callable[[], Sequence[str]], connect: Connect
) -> RouterReports | None:
    """See Ask; `addresses` returns where routers are administered. Each router knows only its own part of the load."""
    asked = addresses()
    answers = await asyncio.gather(*(_ask_one(connect, address, window_s) for address in asked))
    reports = [answer for answer in answers if answer is not None]
    if not reports or len(reports) < len(asked):
        return None
    try:
        demands = [demand_from_proto(report.demand) for report in reports]
    except ValueError as error:
        logger.warning("a router's report cannot be used: %s", error)
        return None
    conditions = {each.worker_id: each for report in reversed(reports) for each in report.workers}
    return RouterReports(demand=merge_demands(demands), conditions=conditions)


async def _ask_one(connect: Connect, address: str, window_s: float) -> router_admin_pb2.GetDemandResponse | None:
    async with connect(address) as channel:
        stub = router_admin_pb2_grpc.RouterAdminServiceStub(channel)
        try:
            return await stub.GetDemand(router_admin_pb2.GetDemandRequest(window_s=window_s), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.warning("router does not report its demand", extra={"address": address, "code": str(error.code())})
            return None


def make_observation(reports: RouterReports, workforce: Workforce, scaler: Scaler, *, now_s: float) -> Observation:
    """Return the planner's observation. Workers that no router knows yet count as starting."""
    pools = {Pool.PREFILL: scaler.config.pools.prefill, Pool.DECODE: scaler.config.pools.decode}
    workers = [
        _observed(process.spec.name, pool, reports.conditions.get(process.spec.name), pools[pool].max_running)
        for pool in Pool
        for process in workforce.workers(ProcessRole(pool.value))
    ]
    return Observation(
        now_s=now_s,
        demand=reports.demand,
        workers=tuple(workers),
        startup_s=scaler.start_times.medians(),
        drain_s=scaler.drain_times.medians(),
    )


def _observed(
    name: str, pool: Pool, condition: router_admin_pb2.WorkerCondition | None, max_running: int
) -> ObservedWorker:
    reported = condition or router_admin_pb2.WorkerCondition()
    phase = WorkerPhase.SERVING if reported.is_serving else WorkerPhase.STARTING
    timing = None
    if reported.HasField("timing"):
        try:
            timing = timing_from_proto(reported.timing)
        except ValueError as error:
            logger.warning("%s: its speed cannot be used: %s", name, error)
    load = reported.load
    return ObservedWorker(
        worker_id=WorkerId(name),
        pool=pool,
        phase=WorkerPhase.DRAINING if reported.is_draining else phase,
        timing=timing,
        num_running=load.num_running,
        num_waiting=load.num_waiting + load.num_reserved,
        num_pending_prefill_tokens=load.num_pending_prefill_tokens,
        num_context_tokens=load.num_context_tokens,
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        block_size=reported.block_size,
        max_running=max_running,
        num_tier_blocks=load.num_tier_blocks,
        max_tier_blocks=load.max_tier_blocks,
        block_bytes=reported.block_bytes,
    )
