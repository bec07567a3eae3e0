"""The routers of a replay by name: a policy's, or `predictive` without some of its parts, to show what each brings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from measure.simulate.policies.registry import GREEDY_PERFECT_SIGNALS, REPLAY_POLICIES
from measure.simulate.records import SimSettings
from router.line.fair_queue import FairQueue
from router.line.tenant_queue import P
from router.parts import Substitutes
from router.placement.policies.predictive import Predictive


class ArrivalQueue(FairQueue[P]):
    """A line in which a tenant's requests of equal priority go in order of arrival, late or not."""

    def push(self, place: P, *, tenant: str, is_spared: bool = False) -> None:
        """Add a newcomer behind all earlier ones of its tenant and priority; `due_s` has no effect."""
        priority, *_urgency, number = place.rank
        place.rank, place.due_s = (priority, number), math.inf
        super().push(place, tenant=tenant, is_spared=is_spared)


_PERFECT_REPORT_INTERVAL_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRouters:
    """What replaces parts of the configured routers."""

    substitutes: Substitutes
    sheds: bool = True
    """Whether `router.shed` applies as configured, or else refuses nothing."""
    is_perfect: bool = False
    """Whether the routers know the workers' state at once, and the lengths of the answers."""

    def replacing(self, settings: SimSettings) -> SimSettings:
        """Return a run's settings with these routers."""
        router = settings.router if self.sheds else settings.router.model_copy(update={"shed": "none"})
        settings = replace(settings, router=router, substitutes=self.substitutes)
        if self.is_perfect:
            return replace(settings, report_interval_s=_PERFECT_REPORT_INTERVAL_S, event_lag_s=0.0)
        return settings


_UNORDERED = Substitutes(policy=Predictive, queue=ArrivalQueue)
ABLATIONS: Mapping[str, ReplayedRouters] = MappingProxyType(
    {
        "predictive_without_shedding": ReplayedRouters(substitutes=Substitutes(policy=Predictive), sheds=False),
        "predictive_without_order": ReplayedRouters(substitutes=_UNORDERED),
        "predictive_placement_alone": ReplayedRouters(substitutes=_UNORDERED, sheds=False),
    }
)


def policy_names() -> tuple[str, ...]:
    """Return every policy that can be replayed."""
    return (*REPLAY_POLICIES, *ABLATIONS)


def routers_of(policy: str) -> ReplayedRouters:
    """Return the routers of a policy, one of `policy_names`."""
    if policy in ABLATIONS:
        return ABLATIONS[policy]
    substitutes = Substitutes(policy=REPLAY_POLICIES[policy])
    return ReplayedRouters(substitutes=substitutes, is_perfect=policy == GREEDY_PERFECT_SIGNALS)
