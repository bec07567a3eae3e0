"""Policies by the names that serving.yaml accepts."""

from collections.abc import Mapping
from types import MappingProxyType

from router.placement.plans import PolicyFactory
from router.placement.policies import simple
from router.placement.policies.pooled import pooled
from router.placement.policies.predictive import Predictive

POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        "predictive": Predictive,
        "random": pooled(lambda rng: simple.Random(rng=rng)),
        "round_robin": pooled(lambda _rng: simple.RoundRobin()),
        "power_of_two": pooled(lambda rng: simple.PowerOfTwo(rng=rng)),
        "least_load": pooled(lambda _rng: simple.LeastLoad()),
        "longest_prefix": pooled(lambda _rng: simple.LongestPrefix()),
    }
)
