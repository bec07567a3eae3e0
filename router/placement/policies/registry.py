"""Policies by name: those that serving.yaml accepts, and those for simulations alone."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from common.errors import Refused
from router.placement.plans import FleetView, PlacementRequest, Plan, Policy, PolicySettings
from router.placement.policies import simple
from router.placement.policies.aibrix import AibrixDecode, AibrixPrefill, AibrixWhole
from router.placement.policies.dynamo import DECODE, PREFILL, WHOLE, DynamoLinear, DynamoLmetric
from router.placement.policies.forecast import forecast_prompt
from router.placement.policies.greedy import Greedy
from router.placement.policies.llm_d import DISAGGREGATED, NON_CACHED_TOKENS, UNIFIED, LlmD
from router.placement.policies.mooncake import Mooncake
from router.placement.policies.pooled import PooledPolicy, Selector
from router.placement.policies.predictive import Predictive
from router.placement.policies.ray_prefix import RayPrefix
from router.placement.policies.sglang import CacheAware, CacheAwareEvents

Factory = Callable[[PolicySettings], Policy]
_MakeSelector = Callable[[random.Random], Selector]


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """Return a new policy. Raises KeyError for a name in neither `POLICIES` nor `SIMULATED_POLICIES`."""
    return {**POLICIES, **SIMULATED_POLICIES}[name](settings)


def _pooled(
    whole: _MakeSelector,
    prefill: _MakeSelector | None = None,
    decode: _MakeSelector | None = None,
    *,
    threshold: int | None = None,
) -> Factory:
    """Return the factory of a policy with one selector for each stage, which share a seeded generator.

    A stage that is left out has a selector like that of the whole request. `threshold` replaces the configured limit
    of local prefills.
    """

    def make(settings: PolicySettings) -> Policy:
        rng = random.Random(settings.seed)
        return PooledPolicy(
            whole=whole(rng),
            prefill=(prefill or whole)(rng),
            decode=(decode or whole)(rng),
            local_prefill_max_tokens=settings.local_prefill_max_tokens if threshold is None else threshold,
        )

    return make


def _sglang(selector: type[CacheAware]) -> Factory:
    return _pooled(lambda _rng: selector(), decode=lambda rng: simple.PowerOfTwo(rng=rng))


def _dynamo(selector: type[DynamoLinear]) -> Factory:
    return _pooled(
        lambda rng: selector(WHOLE, rng=rng),
        lambda rng: selector(PREFILL, rng=rng),
        lambda rng: selector(DECODE, rng=rng),
    )


class _WithForecast:
    """Chooses as another policy does, and predicts the first token of its plans.

    Most published policies predict no times, so that `router.shed` refuses a request only when no worker at all could
    serve it in time, those included that the policy would not choose. With a forecast of its own plan such a policy
    refuses what it would serve late, which is the best shedding for a comparison under overload.
    """

    def __init__(self, policy: Policy) -> None:
        """`policy`: one whose plans neither predict nor pull."""
        self._policy = policy

    def choose(self, request: PlacementRequest, fleet: FleetView) -> Plan | Refused:
        """Return the policy's plan with the wait and the computation at its worker, or the policy's refusal."""
        plan = self._policy.choose(request, fleet)
        if isinstance(plan, Refused):
            return plan
        worker = (fleet.decode if plan.prefill is None else fleet.prefill).find(plan.computes)
        assert worker is not None, f"{plan.computes} is not in the view"
        return replace(plan, predicted_ttft_s=forecast_prompt(request, worker).ttft_s)


POLICIES: Mapping[str, Factory] = MappingProxyType(
    {
        "predictive": Predictive,
        "random": _pooled(lambda rng: simple.Random(rng=rng)),
        "round_robin": _pooled(lambda _rng: simple.RoundRobin()),
        "power_of_two": _pooled(lambda rng: simple.PowerOfTwo(rng=rng)),
        "least_load": _pooled(lambda _rng: simple.LeastLoad()),
        "longest_prefix": _pooled(lambda _rng: simple.LongestPrefix()),
        "sglang_cache_aware": _sglang(CacheAware),
        "sglang_cache_aware_events": _sglang(CacheAwareEvents),
        "dynamo": _dynamo(DynamoLinear),
        "dynamo_lmetric": _dynamo(DynamoLmetric),
        "llm_d": _pooled(
            lambda rng: LlmD(UNIFIED, rng=rng),
            lambda rng: LlmD(DISAGGREGATED, rng=rng),
            lambda rng: LlmD(DISAGGREGATED, rng=rng),
            threshold=NON_CACHED_TOKENS - 1,
        ),
        "ray_prefix": _pooled(lambda _rng: RayPrefix()),
        "aibrix": _pooled(
            lambda rng: AibrixWhole(rng=rng), lambda rng: AibrixPrefill(rng=rng), lambda rng: AibrixDecode(rng=rng)
        ),
        "mooncake": Mooncake,
    }
)
"""Policies that serving.yaml accepts."""

GREEDY_PERFECT_SIGNALS = "greedy_perfect_signals"
SIMULATED_POLICIES: Mapping[str, Factory] = MappingProxyType(
    {
        GREEDY_PERFECT_SIGNALS: Greedy,
        "dynamo_with_forecast": lambda settings: _WithForecast(POLICIES["dynamo"](settings)),
        "least_load_with_forecast": lambda settings: _WithForecast(POLICIES["least_load"](settings)),
    }
)
"""Policies for comparisons: with signals that only a simulation has, or with a forecast for `router.shed`."""
