"""The interface of a routing policy, and its settings."""

import math
from dataclasses import dataclass
from typing import Protocol

from common.errors import Refused
from router.placement.plans import FleetView, PlacementRequest, Plan


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
    """`predictive` and `greedy_perfect_signals`: prompts that would wait longer at every worker stay queued."""
    seed: int = 0
    """Seed of a policy's random choices."""
    refuses_over_slo: bool = False
    """`mooncake`: refuse requests that are predicted to miss their objectives."""
