"""What a routing policy is, and what it may be told."""

import math
from dataclasses import dataclass
from typing import Protocol

from common.errors import Refused
from router.placement.plans import FleetView, Plan, RouteRequest

RETRY_AFTER_S = 1.0
"""When to ask again after a refusal, for want of anything better."""


class Policy(Protocol):
    """Chooses the workers of a request. Event loop only."""

    def choose(self, request: RouteRequest, fleet: FleetView) -> Plan | Refused:
        """Return a plan whose workers are in the view, or why there is none now. Does not book."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """What policies are made with. Each takes what concerns it."""

    local_prefill_max_tokens: float = 0
    """A prompt with at most this many uncached tokens on its decode worker is prefilled there."""
    max_prefill_wait_s: float = math.inf
    """Predictive and the oracle: prompts that would wait longer at every worker wait in the router's line."""
    seed: int = 0
    """Of a policy's random choices."""
    refuses_over_slo: bool = False
    """Mooncake alone: refuse what is predicted to miss its objectives."""
