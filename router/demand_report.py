"""What a router tells planners: the demand on it, and every worker as it knows it."""

from dataclasses import replace

from common.demand import demand_to_proto
from common.timing_wire import timing_to_proto
from kvrelay.v1 import router_admin_pb2, worker_pb2
from router.member import Member, WorkerState
from router.parts import RouterParts
from router.pool_timing import MIN_SAMPLES


def demand_report(parts: RouterParts, *, window_s: float) -> router_admin_pb2.GetDemandResponse:
    """Return the report on the last `window_s` seconds."""
    admission = parts.admission
    demand = parts.orchestrator.demand.demand(
        window_s, num_queued=admission.num_queued, num_queued_tokens=admission.num_queued_tokens
    )
    return router_admin_pb2.GetDemandResponse(
        demand=demand_to_proto(demand), workers=[_condition(member) for member in parts.fleet.members]
    )


def _condition(member: Member) -> router_admin_pb2.WorkerCondition:
    endpoint, facts = member.endpoint, member.facts
    condition = router_admin_pb2.WorkerCondition(
        worker_id=endpoint.worker_id,
        role=endpoint.role,
        is_serving=member.state is WorkerState.READY and not member.is_draining,
        is_draining=member.is_draining,
        load=member.report,
        block_size=0 if facts is None else facts.block_size,
    )
    timing = member.timing
    own = timing.prefill if endpoint.role == worker_pb2.WORKER_ROLE_PREFILL else timing.decode
    if own.num_samples >= MIN_SAMPLES:  # else it is a guess
        condition.timing.CopyFrom(timing_to_proto(replace(timing, links={}), {}))
    return condition
