"""Plans and decisions as wire messages."""

from collections.abc import Iterable

from kvrelay.v1 import inference_pb2 as pb
from router.placement.decisions import Decision
from router.placement.plans import Candidate, Plan, PlanKind

_KINDS = {PlanKind.REMOTE: pb.PLAN_KIND_REMOTE, PlanKind.LOCAL: pb.PLAN_KIND_LOCAL}


def plan_to_proto(plan: Plan, *, attempt: int) -> pb.PlanChosen:
    """Return the part of a plan that its client sees."""
    return pb.PlanChosen(
        kind=_KINDS[plan.kind],
        prefill_worker_id=plan.prefill or "",
        decode_worker_id=plan.decode,
        predicted_cached_tokens=plan.predicted_cached_tokens,
        reason=plan.reason,
        attempt=attempt,
        source_worker_id="" if plan.pull is None else plan.pull.source,
        num_source_blocks=0 if plan.pull is None else plan.pull.num_blocks,
        predicted_ttft_s=plan.predicted_ttft_s or 0.0,
        predicted_itl_s=plan.predicted_itl_s or 0.0,
    )


def explain(decisions: Iterable[Decision], *, policy: str, now_s: float) -> pb.ExplainResponse:
    """Return the decisions with all options that were compared."""
    return pb.ExplainResponse(decisions=[_decision(decision, policy, now_s) for decision in decisions])


def _decision(decision: Decision, policy: str, now_s: float) -> pb.Decision:
    plan = decision.plan
    return pb.Decision(
        request_id=decision.request_id,
        attempt=decision.attempt,
        age_s=now_s - decision.decided_s,
        policy=policy,
        num_tokens=decision.num_tokens,
        plan=plan_to_proto(plan, attempt=decision.attempt),
        candidates=[_candidate(candidate) for candidate in plan.candidates()],
        num_candidates=plan.num_candidates,
        decision_s=decision.decision_s,
        outcome=pb.DecisionOutcome(
            num_cached_tokens=decision.num_cached_tokens,
            ttft_s=decision.ttft_s,
            mean_itl_s=decision.mean_itl_s,
            ended=decision.ended,
        ),
    )


def _candidate(candidate: Candidate) -> pb.Candidate:
    return pb.Candidate(
        kind=_KINDS[candidate.kind],
        prefill_worker_id=candidate.prefill or "",
        decode_worker_id=candidate.decode,
        source_worker_id=candidate.source or "",
        cost=candidate.cost,
        terms=candidate.terms,
    )
