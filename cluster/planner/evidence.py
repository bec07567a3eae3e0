"""A planner's evidence: the shapes of requests, the speed of workers, and the resulting capacity of both pools."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.planner.capacity import Objectives
from cluster.planner.decode_capacity import DecodeCapacity, DecodeRoom
from cluster.planner.plan import Observation, ObservedWorker, Pool
from cluster.planner.prefill_capacity import PrefillCapacity
from cluster.planner.tier_hits import tier_hits
from common.demand import Demand, RequestShape
from common.slo import Slo
from common.timing import TYPICAL_BATCH, TYPICAL_CHUNK, TimingModel, median_model

_MAX_SHAPES = 512


class ShapeMemory:
    """A sample of recently finished requests; it spans several windows, so that it contains rare long ones."""

    def __init__(self, *, memory_s: float) -> None:
        self._memory_s = memory_s
        self._seen: deque[tuple[float, tuple[RequestShape, ...]]] = deque()

    def add(self, now_s: float, demand: Demand) -> None:
        """Add a window's sample. Samples older than the memory are dropped, except the newest."""
        if demand.shapes:
            self._seen.append((now_s, demand.shapes))
        while len(self._seen) > 1 and now_s - self._seen[0][0] > self._memory_s:
            self._seen.popleft()

    @property
    def shapes(self) -> Sequence[RequestShape]:
        """Shapes of at most a few hundred requests, evenly thinned: equal windows give equal samples."""
        shapes = [shape for _time_s, seen in self._seen for shape in seen]
        stride = max(1.0, len(shapes) / _MAX_SHAPES)
        return [shapes[int(position * stride)] for position in range(min(len(shapes), _MAX_SHAPES))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Capacities of both pools."""

    prefill: PrefillCapacity
    decode: DecodeCapacity


def measure(observed: Observation, shapes: Sequence[RequestShape], *, objectives: Objectives) -> Capacities | str:
    """Return both pools' capacities, or a sentence about the missing evidence."""
    prefill = _typical_timing(observed, Pool.PREFILL)
    decode = _typical_timing(observed, Pool.DECODE)
    room = _room(observed)
    if prefill is None or decode is None or room is None:
        pool = Pool.PREFILL if prefill is None else Pool.DECODE
        return f"no {pool} worker has measured its own speed yet"
    return Capacities(
        prefill=PrefillCapacity(
            prefill,
            shapes,
            objectives,
            burstiness=max(1.0, observed.demand.burstiness),
            tiers=tier_hits(observed),
        ),
        decode=DecodeCapacity(decode, shapes, objectives, room=room),
    )


def objectives_of(slo: Slo, *, attainment: float, max_utilization: float) -> Objectives:
    """Return the objectives of each pool with which both together hold for `attainment` of the requests."""
    return Objectives(slo=slo, attainment=attainment**0.5, max_utilization=max_utilization)


def _typical_timing(observed: Observation, pool: Pool) -> TimingModel | None:
    """Return the median worker's model; from the other pool if this one has none."""
    shape = TYPICAL_CHUNK if pool is Pool.PREFILL else TYPICAL_BATCH
    for candidates in (_of(observed, pool), observed.workers):
        models = [worker.timing for worker in candidates if worker.timing is not None]
        if models:
            return median_model(models, lambda model: model.step_s(shape))
    return None


def _room(observed: Observation) -> DecodeRoom | None:
    """Return the room in the smallest decode worker."""
    workers = [worker for worker in _of(observed, Pool.DECODE) if worker.num_blocks > 0 and worker.block_size > 0]
    if not workers:
        return None
    smallest = min(workers, key=lambda worker: worker.num_blocks * worker.block_size)
    return DecodeRoom(num_blocks=smallest.num_blocks, block_size=smallest.block_size, max_running=smallest.max_running)


def _of(observed: Observation, pool: Pool) -> Sequence[ObservedWorker]:
    return [worker for worker in observed.workers if worker.pool is pool]
