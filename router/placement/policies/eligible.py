"""Shared by policies: the workers that could serve a request, refusals, and turns."""

from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import RefusalCause, Refused
from common.ids import WorkerId
from router.placement.answer_pool import AnswerPool
from router.placement.loads import PoolLoads, ProjectedLoad
from router.placement.plans import Busy, FleetView, NoRoom, NoWorker, PlacementRequest

RETRY_AFTER_S = 1.0
"""Pause before asking again after a refusal whose end cannot be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eligible:
    """The workers that could serve one request now."""

    prefill: PoolLoads
    """Prefill workers that could hold the prompt."""
    decode: PoolLoads
    """Decode workers with enough free pages; at least one."""
    must_be_local: bool
    """No prefill worker could ever compute the prompt."""


def find_eligible(request: PlacementRequest, fleet: FleetView) -> Eligible | Refused:
    """Return the workers that can serve the request, or why none can answer it."""
    if not fleet.decode:
        return refuse_without(request.pool)
    with_slots = fleet.decode.where(fleet.decode.num_free_slots >= request.num_samples)
    if not with_slots:
        is_full = not (fleet.decode.num_free_slots >= 1).any()
        return NoRoom(
            reason=f"no {request.pool.value} worker may run {request.num_samples} more sequences",
            retry_after_s=RETRY_AFTER_S,
            cause=RefusalCause.SATURATED if is_full else RefusalCause.NO_ROOM,
        )
    decode = with_slots.with_room(num_blocks=request.num_decode_blocks, num_growth_blocks=request.num_growth_blocks)
    if not decode:
        free = int((with_slots.num_free_blocks - with_slots.num_growth_blocks).max())
        wanted = f"{request.num_decode_blocks} free pages and {request.num_growth_blocks:.0f} for the answer"
        reason = f"no {request.pool.value} worker has {wanted}; the most is {free}"
        return NoRoom(reason=reason, retry_after_s=RETRY_AFTER_S)
    prefill = fleet.prefill.where(fleet.prefill.num_blocks >= request.num_prefill_blocks)
    none_is_large_enough = bool(fleet.prefill) and not prefill
    return Eligible(prefill=prefill, decode=decode, must_be_local=fleet.num_prefill == 0 or none_is_large_enough)


def refuse_without(pool: AnswerPool) -> NoWorker:
    """Return the refusal of a request that needs a worker of a pool while none may be chosen."""
    return NoWorker(reason=f"no {pool.value} worker is available", retry_after_s=RETRY_AFTER_S)


def refuse_busy(worker: ProjectedLoad, wait_s: float, max_wait_s: float) -> Busy:
    """Return the refusal of a prompt that stays queued until a worker can begin with it soon."""
    return Busy(
        reason=f"every worker is busy with prompts for {wait_s:.1f} s",
        retry_after_s=wait_s - max_wait_s,
        worker=worker,
    )


class Turns:
    """Ranks workers by how long ago they were chosen."""

    def __init__(self) -> None:
        self._now = 0
        self._last: dict[WorkerId, int] = {}

    def last_turns(self, workers: Iterable[ProjectedLoad]) -> list[int]:
        """Return the last turn of each of some workers."""
        last = self._last
        return [last.get(worker.worker_id, 0) for worker in workers]

    def last_turn(self, worker_id: WorkerId) -> int:
        """Return the turn in which the worker was chosen last; 0: never."""
        return self._last.get(worker_id, 0)

    def take(self, *worker_ids: WorkerId) -> None:
        """Note that these workers have just been chosen, together."""
        self._now += 1
        self._last.update(dict.fromkeys(worker_ids, self._now))
