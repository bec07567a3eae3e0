"""A planner's interface and its answer: sizes for both pools, and why."""

from dataclasses import dataclass
from typing import Protocol

from cluster.planner.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Workers in each pool, including starting and excluding draining ones."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """A planner's answer. Where one pool shrinks and the other grows, workers flip first."""

    sizes: PoolSizes
    reason: str
    """For people: the observation, the conclusion, and what delays a change."""
    terms: tuple[tuple[str, float], ...] = ()
    """Names and values of the underlying numbers, in reading order."""


class Planner(Protocol):
    """Decides pool sizes. Keeps the history it needs; time comes only from observations."""

    def plan(self, observed: Observation) -> ScalingPlan:
        """Return the sizes that the pools should have now. Called at a steady interval. Never raises."""
        ...
