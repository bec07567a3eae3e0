"""Tells workers, at the end of each turn, when its session may come back to the blocks that they hold."""

from common.block_hash import NO_HASHES, BlockHashes
from common.clock import Clock
from common.ids import WorkerId
from common.return_curve import ReturnCurve
from common.wire_names import PlanKind
from kvrelay.v1 import worker_pb2
from router.fleet.fleet import Fleet
from router.placement.plans import Plan, RetainedOn
from router.record.record import RunningRequest
from router.record.sessions import Sessions


class Returns:
    """Follows the sessions of all requests, with `router.retention: sessions`. Event loop only."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._sessions = Sessions(clock)

    def begin(self, record: RunningRequest) -> None:
        """Recognize the session of a request."""
        job = record.job
        if job.embedding is None:
            record.session = self._sessions.begin(record.tenant.name, job.prompt_hashes, name=job.session_name)

    def end(self, record: RunningRequest) -> None:
        """Learn from a turn that has ended well, and tell the workers that keep its blocks."""
        job = record.job
        if record.session is None or job.sampling.n != 1:
            return
        curve = self._sessions.end(
            record.tenant.name, record.session, job.prompt_hashes, calls_tool=record.ends_in_calls
        )
        if curve is None or record.plan is None:
            return
        hashes = job.hashes(record.ledger.output(0)[:-1])  # of the last token there is no KV
        for worker_id in _keepers(record.plan):
            self._tell(worker_id, _note(hashes, job.prompt_hashes, curve))

    def _tell(self, worker_id: WorkerId, note: worker_pb2.ExpectedReturn) -> None:
        member = self._fleet.members_by_id.get(worker_id)
        if member is not None and member.is_accepted:
            member.client.returns.put(note)


def _keepers(plan: Plan) -> list[WorkerId]:
    """Return the workers that keep the blocks of a plan."""
    if plan.kind is PlanKind.LOCAL or plan.prefill is None:
        return [plan.answering]
    on = {RetainedOn.DECODE: plan.answering, RetainedOn.PREFILL: plan.prefill}
    return list(on.values()) if plan.retained_on is RetainedOn.BOTH else [on[plan.retained_on]]


def _note(hashes: BlockHashes, prompt: BlockHashes, curve: ReturnCurve) -> worker_pb2.ExpectedReturn:
    ends = [each[-1] for each in (hashes, prompt) if each != NO_HASHES]
    return worker_pb2.ExpectedReturn(ends=ends, like_s=curve.like_s, ages_s=curve.ages_s)
