"""What a planner answers: sizes for both pools, and why."""

from dataclasses import dataclass
from typing import Protocol

from cluster.planner.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Workers in each pool, starting ones included, draining ones not."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """A planner's answer. Where one pool shrinks and the other grows, whoever carries it out flips workers first."""

    sizes: PoolSizes
    reason: str
    """In words, for people: what was observed, what follows, and what holds a change back."""
    terms: tuple[tuple[str, float], ...] = ()
    """The numbers behind it by name, in the order in which they are to be read."""


class Planner(Protocol):
    """Decides. Keeps what it needs of the past; time comes with the observation alone."""

    def plan(self, observed: Observation) -> ScalingPlan:
        """Return the sizes that the pools should have now. Called at a steady interval. Never raises."""
        ...
