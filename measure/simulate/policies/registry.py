"""Policies by name, for replays: those that serving.yaml accepts, and those that are only simulated."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from common.errors import Refused
from measure.simulate.policies.affinity import SessionAffinity
from measure.simulate.policies.aibrix import AibrixDecode, AibrixPrefill, AibrixWhole
from measure.simulate.policies.dynamo import DECODE, PREFILL, WHOLE, DynamoLinear, DynamoLmetric
from measure.simulate.policies.greedy import Greedy
from measure.simulate.policies.llm_d import DISAGGREGATED, NON_CACHED_TOKENS, UNIFIED, LlmD
from measure.simulate.policies.lmetric import Lmetric
from measure.simulate.policies.mooncake import Mooncake
from measure.simulate.policies.ray_prefix import RayPrefix
from measure.simulate.policies.sglang import CacheAware, CacheAwareEvents
from router.placement.plans import FleetView, PlacementRequest, Plan, Policy, PolicyFactory
from router.placement.policies.forecast import forecast_prompt
from router.placement.policies.pooled import pooled
from router.placement.policies.registry import POLICIES
from router.placement.policies.simple import PowerOfTwo


def _sglang(selector: type[CacheAware]) -> PolicyFactory:
    return pooled(lambda _rng: selector(), decode=lambda rng: PowerOfTwo(rng=rng))


def _dynamo(selector: type[DynamoLinear]) -> PolicyFactory:
    return pooled(
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


_DYNAMO = _dynamo(DynamoLinear)
GREEDY_PERFECT_SIGNALS = "greedy_perfect_signals"
SIMULATED_POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        "sglang_cache_aware": _sglang(CacheAware),
        "sglang_cache_aware_events": _sglang(CacheAwareEvents),
        "dynamo": _DYNAMO,
        "dynamo_lmetric": _dynamo(DynamoLmetric),
        "lmetric": pooled(
            lambda rng: Lmetric(computes=True, rng=rng),
            decode=lambda rng: Lmetric(computes=False, rng=rng),
        ),
        "session_affinity": pooled(lambda _rng: SessionAffinity()),
        "llm_d": pooled(
            lambda rng: LlmD(UNIFIED, rng=rng),
            lambda rng: LlmD(DISAGGREGATED, rng=rng),
            lambda rng: LlmD(DISAGGREGATED, rng=rng),
            threshold=NON_CACHED_TOKENS - 1,
        ),
        "ray_prefix": pooled(lambda _rng: RayPrefix()),
        "aibrix": pooled(
            lambda rng: AibrixWhole(rng=rng), lambda rng: AibrixPrefill(rng=rng), lambda rng: AibrixDecode(rng=rng)
        ),
        "mooncake": Mooncake,
        GREEDY_PERFECT_SIGNALS: Greedy,
        "dynamo_with_forecast": lambda settings: _WithForecast(_DYNAMO(settings)),
        "least_load_with_forecast": lambda settings: _WithForecast(POLICIES["least_load"](settings)),
    }
)
"""Policies for comparisons: of other systems, with signals that only a simulation has, or with a forecast for
`router.shed`."""
REPLAY_POLICIES: Mapping[str, PolicyFactory] = MappingProxyType({**POLICIES, **SIMULATED_POLICIES})
