"""The interface of a routing policy: what it sees, what it answers, and its settings."""

import enum
import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from common.block_hash import NO_HASHES, BlockHashes, num_usable_blocks
from common.errors import RefusalCause, Refused
from common.ids import RequestId, WorkerId
from common.wire_names import PlanKind
from router.placement.answer_pool import AnswerPool
from router.placement.loads import PoolLoads, ProjectedLoad
from router.tenants import ANYBODY, Tenant


class RetainedOn(enum.Enum):
    """Worker of a remote plan that keeps the prompt's blocks for later requests; the other evicts them first."""

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
class PlanCandidate:
    """An option that was compared, for `Explain`."""

    prefill: WorkerId | None
    """Set exactly when the option is remote."""
    answering: WorkerId
    source: WorkerId | None = None
    cost: float
    """Cost that the policy minimizes."""
    terms: Mapping[str, float]
    """Parts of the cost by name; seconds unless the name says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where a request goes."""

    answering: WorkerId
    """The worker that answers."""
    prefill: WorkerId | None = None
    """Set exactly when the plan is remote."""
    predicted_cached_tokens: int
    """Cached tokens on the worker that computes the prompt, pulled ones included."""
    reason: str
    pull: Pull | None = None
    """Pull of the worker that computes the prompt."""
    retained_on: RetainedOn = RetainedOn.BOTH
    predicted_prefill_s: float | None = None
    """Computation alone. None without a prediction: the booking then uses the worker's own timing model."""
    predicted_ttft_s: float | None = None
    """Time from the choice to the first token."""
    predicted_tpot_s: float | None = None
    """Gap between tokens on the decode worker, this request included."""
    pool: AnswerPool = AnswerPool.DECODE
    predicted_tier_read_s: float = 0.0
    """Part of `predicted_ttft_s` in which nothing but reads from tiers is waited for."""
    tier_reads: Mapping[WorkerId, int] = field(default_factory=dict)
    """Blocks that workers read from their tiers for it: the one that computes, and the source of the pull."""
    max_wait_s: float = math.inf
    """Longest wait for other prompts at the worker that computes this one; beyond it, the worker refuses."""
    candidates: Callable[[], tuple[PlanCandidate, ...]] = tuple
    """Returns the best options, the chosen one first. Called on demand, by `Explain`."""
    num_candidates: int = 1

    @property
    def kind(self) -> PlanKind:
        """How the request is served."""
        return PlanKind.PREFILL if self.pool is AnswerPool.PREFILL else kind_of(self.prefill)

    @property
    def computes(self) -> WorkerId:
        """The worker that computes the prompt."""
        return self.answering if self.prefill is None else self.prefill


def kind_of(prefill: WorkerId | None) -> PlanKind:
    """Return the kind of an option that generates, by its prefill worker."""
    return PlanKind.LOCAL if prefill is None else PlanKind.REMOTE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """A request, or the rest of one, that needs a plan; and, once a choice begins, the caches as they are then."""

    request_id: RequestId
    num_tokens: int
    """Prompt and the output so far: all of it must be in the KV cache before the next token."""
    block_size: int
    tenant: Tenant = ANYBODY
    num_samples: int = 1
    hashes: BlockHashes = NO_HASHES
    """Hashes of the full blocks of these tokens; empty when cached KV cannot be used."""
    num_output_tokens: int = 256
    """Expected length of each answer, or of the rest of one; never more than max_tokens."""
    typical_output_tokens: int = 256
    """Mean length of all answers, as far as known."""
    received_s: float = 0.0
    """Time of receipt on the router's clock, like all absolute times here."""
    deadline_s: float = math.inf
    """The caller's own deadline."""
    ttft_slo_s: float = math.inf
    """Objective for the time from `received_s` to the first token."""
    tpot_slo_s: float = math.inf
    """Objective for the mean gap between tokens."""
    has_begun: bool = False
    """The client has had its first token, through an earlier plan."""
    pool: AnswerPool = AnswerPool.DECODE
    """Pool whose workers answer it."""
    is_quarantined: bool = False
    """Whether it may be what crashes its workers, so that it needs workers without another quarantined request."""
    now_s: float = 0.0
    """Time of the choice. The chooser sets this field and the following ones."""
    gap_error: float = 1.0
    """Factor by which most mean gaps have exceeded their prediction lately."""
    cached_blocks: Mapping[WorkerId, int] = field(default_factory=dict)
    """Leading blocks that each worker holds and can use (`router/fleet/prefix_groups.py`); without any it is absent."""
    longest_holders: Callable[[], Iterator[tuple[int, WorkerId]]] | None = None
    """Yields the (blocks, worker) of `cached_blocks`, most blocks first. None: they are sorted."""
    count_present: Callable[[WorkerId], int] | None = None
    """Returns how many of these a worker has really stored; `cached_blocks` also counts those that it was sent to
    compute. None: all are present."""
    num_in_pages: Callable[[WorkerId], int] | None = None
    """Returns how many of `cached_blocks` are in the worker's pages: the leading ones; the others are in its tiers
    only. None: all are in pages."""

    @property
    def waited_s(self) -> float:
        """Time since the request was received."""
        return self.now_s - self.received_s

    @property
    def time_left_s(self) -> float:
        """Time until the caller's deadline."""
        return self.deadline_s - self.now_s

    @property
    def num_decode_blocks(self) -> int:
        """Pages that the decode worker must grant: samples share the full blocks, not the rest and the next token."""
        return self.num_tokens // self.block_size + self.num_samples

    @property
    def num_decodes(self) -> int:
        """Sequences that it adds to a decode batch."""
        return 0 if self.pool is AnswerPool.PREFILL else self.num_samples

    @property
    def num_growth_blocks(self) -> float:
        """Further pages that the answers are expected to fill."""
        return self.num_samples * self.num_output_tokens / self.block_size

    @property
    def num_prefill_blocks(self) -> int:
        """Pages that a prefill worker needs."""
        return -(-self.num_tokens // self.block_size)

    @property
    def num_usable_blocks(self) -> int:
        """Leading blocks that a cache can save."""
        return num_usable_blocks(self.num_tokens, self.block_size)

    def best_holders(self, num_holders: int) -> list[tuple[int, WorkerId]]:
        """Return the (blocks, worker) that hold most of the prompt, best first."""
        if self.longest_holders is not None:
            return sorted(islice(self.longest_holders(), num_holders), reverse=True)
        held = ((num_blocks, worker_id) for worker_id, num_blocks in self.cached_blocks.items())
        return heapq.nlargest(num_holders, held)

    def pullable_blocks(self, worker_id: WorkerId) -> int:
        """Return how many leading blocks can be fetched from the worker now."""
        if self.count_present is None:
            return self.cached_blocks.get(worker_id, 0)
        return self.count_present(worker_id)

    def offloaded_blocks(self, worker_id: WorkerId) -> int:
        """Return how many blocks the worker reads from its tiers unless it computes them."""
        if self.num_in_pages is None:
            return 0
        num_usable = min(self.cached_blocks.get(worker_id, 0), self.num_usable_blocks)
        return max(0, num_usable - self.num_in_pages(worker_id))

    def cached_tokens(self, worker_id: WorkerId) -> int:
        """Return how many tokens the worker does not have to compute."""
        return min(self.cached_blocks.get(worker_id, 0), self.num_usable_blocks) * self.block_size

    def missing_tokens(self, worker_id: WorkerId) -> int:
        """Return how many tokens the worker would have to compute."""
        return self.num_tokens - self.cached_tokens(worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The workers that may be chosen for one request. Valid for one decision.

    For a request that the prefill pool answers, it is a cluster without a prefill pool: one worker serves it whole.
    """

    prefill: PoolLoads
    decode: PoolLoads
    """Workers of the pool that answers."""
    num_prefill: int
    """Prefill workers in use, including those that cannot be chosen now."""
    block_bytes: int = 0
    """KV bytes of one block."""
    sources: frozenset[WorkerId] = field(default_factory=frozenset)
    """Workers that blocks may be pulled from: refusing ones included, lost ones not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy(Refused):
    """A refusal until the worker that computes the prompt in the best plan can begin soon."""

    worker: ProjectedLoad
    """That worker, as it is now."""
    cause: RefusalCause = RefusalCause.BUSY


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom(Refused):
    """A refusal until a worker that answers has slots and pages for the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWorker(Refused):
    """A refusal until a worker may be chosen: all are lost, starting, or have just refused the request themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooSlow(Refused):
    """A refusal until answers have ended: with another one, gaps between tokens would miss an objective."""


class Policy(Protocol):
    """Chooses the workers of a request. Event loop only."""

    def choose(self, request: PlacementRequest, fleet: FleetView) -> Plan | Refused:
        """Return a plan whose workers are in the view, or why there is none now. Does not book."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings that policies are made with; each uses those that concern it."""

    local_prefill_max_tokens: float = 0
    """A prompt with at most this many uncached tokens on its decode worker is prefilled there."""
    max_prefill_wait_s: float = math.inf
    """Prompts that would wait longer at every worker stay queued, under policies that predict times."""
    seed: int = 0
    """Seed of a policy's random choices."""


PolicyFactory = Callable[[PolicySettings], Policy]
"""Makes a policy; each router has its own."""
