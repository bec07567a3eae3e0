"""What a routing policy sees and what it answers."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from common.ids import RequestId, WorkerId


class PlanKind(enum.Enum):
    """How a request is served."""

    REMOTE = "remote"
    """A prefill worker computes the prompt and hands its KV to the decode worker."""
    LOCAL = "local"
    """The decode worker computes the uncached suffix itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where a request goes."""

    kind: PlanKind
    decode: WorkerId
    prefill: WorkerId | None
    """Set exactly when the plan is remote."""
    predicted_cached_tokens: int
    """On the worker that prefills."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """A request, or the rest of one, that needs a plan."""

    request_id: RequestId
    num_tokens: int
    """Prompt and the output so far: all of it must be in the KV cache before the next token."""
    block_size: int
    num_decode_blocks: int
    """Pages that the decode worker must grant: the known tokens and a little room to grow."""
    cached_blocks: Mapping[WorkerId, int]
    """Leading blocks that each worker holds; a worker that holds none is absent."""

    @property
    def num_prefill_blocks(self) -> int:
        """Pages that a prefill worker needs."""
        return -(-self.num_tokens // self.block_size)

    def cached_tokens(self, worker_id: WorkerId) -> int:
        """Return how many tokens the worker needs not compute. The last one is always computed, for its logits."""
        usable = (self.num_tokens - 1) // self.block_size
        return min(self.cached_blocks.get(worker_id, 0), usable) * self.block_size

    def missing_tokens(self, worker_id: WorkerId) -> int:
        """Return how many tokens the worker would have to compute."""
        return self.num_tokens - self.cached_tokens(worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A ready worker: its last report and what was booked on it since."""

    worker_id: WorkerId
    num_blocks: int
    num_free_blocks: int
    num_sequences: int
    """Running and waiting."""
    num_pending_prefill_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The workers that may be chosen for one request."""

    prefill: tuple[WorkerLoad, ...]
    decode: tuple[WorkerLoad, ...]
    num_prefill: int
    """Prefill workers in use, those that may not be chosen just now included."""
