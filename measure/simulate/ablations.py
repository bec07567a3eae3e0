"""`predictive` without some of its parts: beside it in a table, what each of them brings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from measure.simulate.policies.registry import REPLAY_POLICIES
from router.line.fair_queue import FairQueue
from router.line.queued_work import Rank
from router.line.tenant_queue import Place, T
from router.parts import Substitutes
from router.placement.policies.predictive import Predictive


class ArrivalQueue(FairQueue[T]):
    """A line in which a tenant's requests of equal priority go in order of arrival, late or not."""

    def push(
        self,
        item: T,
        *,
        tenant: str,
        rank: Rank,
        due_s: float = math.inf,
        deadline_s: float = math.inf,
        work_s: float = 0.0,
    ) -> Place[T]:
        """Add a newcomer behind all earlier ones of its tenant and priority; `due_s` has no effect."""
        priority, *_urgency, number = rank
        return super().push(item, tenant=tenant, rank=(priority, number), deadline_s=deadline_s, work_s=work_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The routers of a row."""

    substitutes: Substitutes
    sheds: bool = True
    """Whether `router.shed` applies as configured, or else refuses nothing."""


_UNORDERED = Substitutes(policy=Predictive, queue=ArrivalQueue)
ABLATIONS: Mapping[str, Arm] = MappingProxyType(
    {
        "predictive_without_shedding": Arm(substitutes=Substitutes(policy=Predictive), sheds=False),
        "predictive_without_order": Arm(substitutes=_UNORDERED),
        "predictive_placement_alone": Arm(substitutes=_UNORDERED, sheds=False),
    }
)


def arm_of(name: str) -> Arm:
    """Return the routers of a row by its name: an ablation's, or that of a policy."""
    return ABLATIONS.get(name) or Arm(substitutes=Substitutes(policy=REPLAY_POLICIES[name]))
