"""What a routing policy sees and what it answers."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.ids import RequestId, WorkerId
from common.timing import GUESSED_TIMING, TimingModel


class PlanKind(enum.Enum):
    """How a request is served."""

    REMOTE = "remote"
    """A prefill worker computes the prompt and hands its KV to the decode worker."""
    LOCAL = "local"
    """The decode worker computes the uncached suffix itself."""


class Keeper(enum.Enum):
    """Which worker of a remote plan keeps the prompt's blocks for later requests; the other lets them go first."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Leading blocks to fetch from another worker before the rest is computed."""

    source: WorkerId
    num_blocks: int
    """Leading blocks that the source holds; what the computing worker holds itself is not fetched again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An option that was compared, for `Explain`."""

    kind: PlanKind
    prefill: WorkerId | None
    decode: WorkerId
    source: WorkerId | None
    cost: float
    """What the policy minimizes."""
    terms: Mapping[str, float]
    """Its parts by name; seconds unless the name says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where a request goes."""

    kind: PlanKind
    decode: WorkerId
    prefill: WorkerId | None
    """Set exactly when the plan is remote."""
    predicted_cached_tokens: int
    """On the worker that computes the prompt, pulled ones included."""
    reason: str
    pull: Pull | None = None
    """By the worker that computes the prompt."""
    keeper: Keeper = Keeper.BOTH
    predicted_prefill_s: float | None = None
    """Computation alone; None when the policy does not predict: the fleet's books then use the worker's own model."""
    predicted_ttft_s: float | None = None
    """From the choice to the first token."""
    predicted_itl_s: float | None = None
    """On the decode worker, with the newcomer."""
    candidates: Callable[[], tuple[Candidate, ...]] = tuple
    """The best options, best first, the chosen one among them. Called when somebody asks."""
    num_candidates: int = 1

    @property
    def computes(self) -> WorkerId:
        """The worker that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """A request, or the rest of one, that needs a plan."""

    request_id: RequestId
    num_tokens: int
    """Prompt and the output so far: all of it must be in the KV cache before the next token."""
    block_size: int
    num_decode_blocks: int
    """Pages that the decode worker must grant: the known tokens and a little room to grow."""
    num_samples: int = 1
    cached_blocks: Mapping[WorkerId, int]
    """Leading blocks that each worker holds; a worker that holds none is absent."""
    count_present: Callable[[WorkerId], int] | None = None
    """Returns how many leading blocks a worker has really stored; `cached_blocks` also counts those that it was sent to
    compute. None: all are present."""
    now_s: float = 0.0
    """On the router's clock, as all absolute times here."""
    waited_s: float = 0.0
    """Since the request came; its time to first token has run so far."""
    ttft_slo_s: float = float("inf")
    """Request received to first token."""
    itl_slo_s: float = float("inf")
    """Mean gap between tokens."""
    time_left_s: float = float("inf")
    """Until the caller's own deadline."""
    num_output_tokens: int = 256
    """Expected length of the answer, for load that it will cause; never more than max_tokens."""

    @property
    def num_prefill_blocks(self) -> int:
        """Pages that a prefill worker needs."""
        return -(-self.num_tokens // self.block_size)

    @property
    def num_usable_blocks(self) -> int:
        """Leading blocks that a cache can save. The last token is always computed, for its logits."""
        return (self.num_tokens - 1) // self.block_size

    def pullable_blocks(self, worker_id: WorkerId) -> int:
        """Return how many leading blocks can be fetched from the worker now."""
        if self.count_present is None:
            return self.cached_blocks.get(worker_id, 0)
        return self.count_present(worker_id)

    def cached_tokens(self, worker_id: WorkerId) -> int:
        """Return how many tokens the worker needs not compute."""
        return min(self.cached_blocks.get(worker_id, 0), self.num_usable_blocks) * self.block_size

    def missing_tokens(self, worker_id: WorkerId) -> int:
        """Return how many tokens the worker would have to compute."""
        return self.num_tokens - self.cached_tokens(worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A ready worker: its last report, and what this router booked on it since."""

    worker_id: WorkerId
    num_blocks: int
    num_free_blocks: int
    num_sequences: int = 0
    """Running, waiting and reserved."""
    num_waiting: int = 0
    """Of those in the last report, the ones that wait for pages or for their KV."""
    num_pending_prefill_tokens: int = 0
    num_decodes: int = 0
    """Sequences that decode, or will as soon as their KV has come."""
    num_context_tokens: int = 0
    """KV tokens of those."""
    prefill_free_at_s: float = 0.0
    """When every prompt accepted or booked so far will be computed, by the worker's own prediction; in the past when
    there is none."""
    num_cold_blocks: int = 0
    """Free pages whose content nobody would miss."""
    num_cached_blocks: int = 0
    """Free pages that hold reusable KV."""
    num_active_requests: int = 0
    """Requests of this router on the worker that have not ended."""
    num_active_prefills: int = 0
    """Those of them whose prompt the worker computes and whose first token has not come."""
    num_active_prefill_tokens: int = 0
    """Prompt tokens of this router's requests there whose first token has not come, cached ones included."""
    num_active_missing_tokens: int = 0
    """The same without those predicted to be cached."""
    num_active_blocks: int = 0
    """Pages that this router's requests there occupy."""
    timing: TimingModel = GUESSED_TIMING

    def prefill_wait_s(self, now_s: float) -> float:
        """Return how long a prompt that comes now waits for those before it."""
        return max(0.0, self.prefill_free_at_s - now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The workers that may be chosen for one request."""

    prefill: tuple[WorkerLoad, ...]
    decode: tuple[WorkerLoad, ...]
    num_prefill: int
    """Prefill workers in use, those that may not be chosen just now included."""
    block_bytes: int = 0
    """KV bytes of one block."""
    sources: frozenset[WorkerId] = field(default_factory=frozenset)
    """Workers that blocks may be pulled from; refusing ones included, lost ones not."""
