"""How many of its cached prompt tokens a prefill pool of another size would compute, since it has other tiers.

Known are the tokens of each request that were read from tiers (R) and those that were computed again since everything
had evicted them (E). Tiers without any room keep none of R + E, present ones R, endless ones all. The curve through
these points with falling gains is assumed in between:

    kept(room) = (R + E)·(1 - (E / (R + E))^(room / present room))

Tiers that are not full would keep no more with more room, and with less as much while that holds what they hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.planner.plan import Observation, Pool, WorkerPhase
from common.demand import RequestShape
from common.timing import GUESSED_LINK, LinkModel, median_model

_FULL = 0.95
"""Share of their room from which tiers count as full: each worker's fills at its own time."""
_REFERENCE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHits:
    """How much of the prompts' KV tiers hold, as a function of the size of the prefill pool."""

    num_workers: int = 1
    """Present prefill workers."""
    num_blocks: int = 0
    """In all tiers of both pools."""
    max_blocks: int = 0
    max_blocks_each: float = 0.0
    """Room of one prefill worker, mean."""
    token_bytes: float = 0.0
    """KV of one token; 0: unknown."""
    read: LinkModel = GUESSED_LINK

    @property
    def is_measured(self) -> bool:
        """Whether the time of a read is known."""
        return self.read.num_samples > 0

    def read_s(self, num_tokens: float) -> float:
        """Return the time to read the KV of a prompt's tokens."""
        return self.read.seconds(num_tokens * self.token_bytes) if num_tokens * self.token_bytes > 0 else 0.0

    def room(self, num_workers: int) -> float:
        """Return the room of the tiers with so many prefill workers, present: 1.0, as far as it matters."""
        if not self.num_blocks or num_workers == self.num_workers:
            return 1.0
        max_blocks = max(0.0, self.max_blocks + (num_workers - self.num_workers) * self.max_blocks_each)
        if self.num_blocks >= _FULL * self.max_blocks:
            return max_blocks / self.max_blocks
        return min(1.0, max_blocks / self.num_blocks)

    def with_workers(self, shapes: Sequence[RequestShape], num_workers: int) -> Sequence[RequestShape]:
        """Return the requests as a pool of another size would see them."""
        room = self.room(num_workers)
        num_read = sum(shape.num_read_tokens for shape in shapes)
        num_evicted = sum(shape.num_evicted_tokens for shape in shapes)
        if room == 1.0 or not num_read:
            return shapes
        missed = num_evicted / (num_read + num_evicted)
        if room < 1.0:
            lost = 1.0 - (1.0 - missed**room) / (1.0 - missed)
            return [_moved(shape, -round(lost * shape.num_read_tokens)) for shape in shapes]
        gained = 1.0 - missed ** (room - 1.0)
        return [_moved(shape, round(gained * shape.num_evicted_tokens)) for shape in shapes]


NO_TIERS = TierHits()


def _moved(shape: RequestShape, num_tokens: int) -> RequestShape:
    """Return a request that reads so many of its computed tokens instead, or computes those that it reads."""
    return replace(
        shape,
        num_computed_tokens=shape.num_computed_tokens - num_tokens,
        num_read_tokens=shape.num_read_tokens + num_tokens,
        num_evicted_tokens=max(0, shape.num_evicted_tokens - num_tokens),
    )


def tier_hits(observed: Observation) -> TierHits:
    """Return what the serving workers say of their tiers."""
    serving = [worker for worker in observed.workers if worker.phase is WorkerPhase.SERVING]
    prefill = [worker for worker in serving if worker.pool is Pool.PREFILL]
    reads = [worker.timing.tier_read for worker in serving if worker.timing is not None]
    links = [link for link in reads if link is not None]
    sizes = [worker.block_bytes / worker.block_size for worker in serving if worker.block_size]
    return TierHits(
        num_workers=len(prefill),
        num_blocks=sum(worker.num_tier_blocks for worker in serving),
        max_blocks=sum(worker.max_tier_blocks for worker in serving),
        max_blocks_each=sum(worker.max_tier_blocks for worker in prefill) / max(1, len(prefill)),
        token_bytes=max(sizes, default=0.0),
        read=median_model(links, lambda link: link.seconds(_REFERENCE_BYTES)) if links else GUESSED_LINK,
    )
