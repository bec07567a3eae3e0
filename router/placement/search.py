"""One search for a plan: what is sought, and which workers have refused it meanwhile."""

from dataclasses import dataclass, field

from common.block_hash import BlockHashes
from common.ids import RequestId, WorkerId
from router.placement.feasibility import Shed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """What a request needs a plan for. Absolute times are on the router's clock."""

    request_id: RequestId
    num_tokens: int
    """Known tokens: prompt and output so far."""
    num_samples: int
    block_size: int
    hashes: BlockHashes
    """Of the full blocks of the known tokens; empty when cached KV cannot be used."""
    num_output_tokens: int = 256
    """Expected length of each answer; never more than max_tokens."""
    received_s: float = 0.0
    deadline_s: float = float("inf")
    """The caller's own."""
    ttft_slo_s: float = float("inf")
    itl_slo_s: float = float("inf")

    @property
    def num_decode_blocks(self) -> int:
        """Pages to ask for: the full blocks are shared by the samples, the rest and the next token are not."""
        full = self.num_tokens // self.block_size
        return full + self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A worker that refused is not asked again before its load has changed or the time has come."""

    load_version: int
    until_s: float


@dataclass(slots=True, eq=False, kw_only=True)
class Search:
    """A search over all the refusals that it meets. Event loop only."""

    sought: Sought
    shed: Shed = Shed.NONE
    exclusions: dict[WorkerId, Exclusion] = field(default_factory=dict)
    version_when_booked: dict[WorkerId, int] = field(default_factory=dict)

    @property
    def wakes_at_s(self) -> float | None:
        """When the first exclusion ends by itself; None without any."""
        return min((exclusion.until_s for exclusion in self.exclusions.values()), default=None)
