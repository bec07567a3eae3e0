"""The ready workers by pool. Every decision reads them, so they are sorted again only when a state changes."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from common.ids import WorkerId
from common.timing import GUESSED_TIMING, TimingModel
from kvrelay.v1 import worker_pb2
from router.fleet.member import Member, WorkerState
from router.placement.answer_pool import AnswerPool
from router.placement.loads import PoolLoads, ProjectedLoad
from router.placement.plans import FleetView, PlacementRequest

_STEP_SHARE = 0.5
"""Share of a full batch's steps that its answers add to them; the rest they share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The members by pool as of the last change of state, and their loads as of the last `refresh`."""

    prefill: PoolLoads
    decode: PoolLoads
    pools: Mapping[Member, PoolLoads]
    """Pool of each member that may be chosen."""
    num_prefill: int
    """Prefill workers in use, including those that are not ready now."""
    ready: frozenset[WorkerId]
    """Ready workers, including draining ones: blocks can be pulled from them."""
    leaving: frozenset[WorkerId]
    """Workers that drain while another of their pool can take over. The last of a pool serves until it is gone."""

    @classmethod
    def of(cls, members: Iterable[Member]) -> "Roster":
        """Sort the members into their pools."""
        pools: dict[int, list[Member]] = {worker_pb2.WORKER_ROLE_PREFILL: [], worker_pb2.WORKER_ROLE_DECODE: []}
        leaving: list[Member] = []
        num_prefill = 0
        for member in members:
            role = member.endpoint.role
            num_prefill += member.is_accepted and role == worker_pb2.WORKER_ROLE_PREFILL
            if member.state is WorkerState.READY:
                pools[role].append(member)
        for pool in pools.values():
            if any(not member.is_draining for member in pool):
                leaving += [member for member in pool if member.is_draining]
                pool[:] = [member for member in pool if not member.is_draining]
        prefill, decode = pools[worker_pb2.WORKER_ROLE_PREFILL], pools[worker_pb2.WORKER_ROLE_DECODE]
        prefill_loads, decode_loads = (PoolLoads(member.load() for member in pool) for pool in (prefill, decode))
        return cls(
            prefill=prefill_loads,
            decode=decode_loads,
            pools=dict.fromkeys(prefill, prefill_loads) | dict.fromkeys(decode, decode_loads),
            num_prefill=num_prefill,
            ready=frozenset(member.endpoint.worker_id for member in (*prefill, *decode, *leaving)),
            leaving=frozenset(member.endpoint.worker_id for member in leaving),
        )

    def refresh(self, changed: Iterable[Member]) -> None:
        """Read the loads of these members again."""
        for member in changed:
            pool = self.pools.get(member)
            if pool is not None:
                pool.replace(member.load())

    def answering(self, pool: AnswerPool) -> PoolLoads:
        """Return the workers of the pool that answers."""
        return self.prefill if pool is AnswerPool.PREFILL else self.decode

    def view(self, pool: AnswerPool, *, excluded: Collection[WorkerId], block_bytes: int) -> FleetView:
        """Return the ready workers that are not excluded, for a request that a pool answers."""
        answering, prefill, num_prefill = self.answering(pool), self.prefill, self.num_prefill
        if answering is prefill:
            prefill, num_prefill = PoolLoads(()), 0
        return FleetView(
            prefill=prefill.without(excluded) if excluded else prefill,
            decode=answering.without(excluded) if excluded else answering,
            num_prefill=num_prefill,
            block_bytes=block_bytes,
            sources=self.ready,
        )

    def has_another(self, member: Member) -> bool:
        """Return whether another ready worker could do what this one does: decode workers also compute prompts."""
        pools = [self.decode]
        if member.endpoint.role == worker_pb2.WORKER_ROLE_PREFILL:
            pools.append(self.prefill)
        return any(len(pool) > (self.pools.get(member) is pool) for pool in pools)

    def load(self, worker_id: WorkerId) -> ProjectedLoad | None:
        """Return the load of a worker that may be chosen; None for any other."""
        return self.prefill.find(worker_id) or self.decode.find(worker_id)

    def may_hold(self, request: PlacementRequest) -> bool:
        """Return False when no worker that answers such requests has room for it; see `PoolLoads.may_hold`."""
        return self.answering(request.pool).may_hold(
            num_sequences=request.num_samples,
            num_blocks=request.num_decode_blocks,
            num_growth_blocks=request.num_growth_blocks,
        )

    @property
    def typical_timing(self) -> TimingModel:
        """The timing model of any worker that computes prompts; a guess without one."""
        return next((load.timing for load in self.prefill or self.decode), GUESSED_TIMING)

    def size_s(self, request: PlacementRequest, work_s: float, *, answer_price: float) -> float:
        """Return what a request costs both pools: `work_s` of one and its answers' time of the other, at their prices.

        `answer_price`: that of a second of decode workers; the rest of 1 is that of the prefill workers. Answers count
        in time of as many workers as compute prompts: the fewer decode for them, the scarcer is their time. Without
        either pool, prompts are what requests differ by.
        """
        if not self.prefill or not self.decode:
            return work_s
        gap = self.decode.loads[0].timing.token_gap
        token_s = (gap.per_decode_s + gap.per_context_token_s * request.num_tokens) / _STEP_SHARE
        answers_s = request.num_decodes * request.num_output_tokens * token_s * len(self.prefill) / len(self.decode)
        return (1 - answer_price) * work_s + answer_price * answers_s

    def prefill_free_at_s(self) -> float:
        """Return the time at which the first worker that computes prompts has finished those it was given."""
        pool = self.prefill or self.decode
        return float(pool.prefill_free_at_s.min()) if pool else 0.0
