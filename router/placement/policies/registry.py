"""The policies by the name that serving.yaml gives them."""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from router.placement.policies import aibrix, dynamo, llm_d, simple
from router.placement.policies.interface import Policy, PolicySettings
from router.placement.policies.longest_prefix import LongestPrefix
from router.placement.policies.mooncake import Mooncake
from router.placement.policies.oracle import Oracle
from router.placement.policies.pooled import PooledPolicy, Selector
from router.placement.policies.predictive import Predictive
from router.placement.policies.ray_prefix import RayPrefix
from router.placement.policies.sglang import CacheAware, CacheAwareEvents

Factory = Callable[[PolicySettings], Policy]


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """Return a new policy. Raises KeyError for a name that is not in `POLICIES`."""
    return POLICIES[name](settings)


def _pooled(
    settings: PolicySettings, *, whole: Selector, prefill: Selector, decode: Selector, threshold: int | None = None
) -> PooledPolicy:
    local = settings.local_prefill_max_tokens if threshold is None else threshold
    return PooledPolicy(whole=whole, prefill=prefill, decode=decode, local_prefill_max_tokens=local)


def _random(settings: PolicySettings) -> Policy:
    selector = simple.Random(rng=random.Random(settings.seed))
    return _pooled(settings, whole=selector, prefill=selector, decode=selector)


def _round_robin(settings: PolicySettings) -> Policy:
    return _pooled(settings, whole=simple.RoundRobin(), prefill=simple.RoundRobin(), decode=simple.RoundRobin())


def _power_of_two(settings: PolicySettings) -> Policy:
    selector = simple.PowerOfTwo(rng=random.Random(settings.seed))
    return _pooled(settings, whole=selector, prefill=selector, decode=selector)


def _least_load(settings: PolicySettings) -> Policy:
    selector = simple.LeastLoad()
    return _pooled(settings, whole=selector, prefill=selector, decode=selector)


def _longest_prefix(settings: PolicySettings) -> Policy:
    return _pooled(settings, whole=LongestPrefix(), prefill=LongestPrefix(), decode=LongestPrefix())


def _sglang(selector: type[CacheAware]) -> Factory:
    def make(settings: PolicySettings) -> Policy:
        decode = simple.PowerOfTwo(rng=random.Random(settings.seed))
        return _pooled(settings, whole=selector(), prefill=selector(), decode=decode)

    return make


def _dynamo(selector: type[dynamo.DynamoLinear]) -> Factory:
    def make(settings: PolicySettings) -> Policy:
        rng = random.Random(settings.seed)
        return _pooled(
            settings,
            whole=selector(dynamo.WHOLE, rng=rng),
            prefill=selector(dynamo.PREFILL, rng=rng),
            decode=selector(dynamo.DECODE, rng=rng),
        )

    return make


def _llm_d(settings: PolicySettings) -> Policy:
    rng = random.Random(settings.seed)
    pool = llm_d.LlmD(llm_d.DISAGGREGATED, rng=rng)
    return _pooled(
        settings,
        whole=llm_d.LlmD(llm_d.WHOLE, rng=rng),
        prefill=pool,
        decode=pool,
        threshold=llm_d.NON_CACHED_TOKENS - 1,
    )


def _ray_prefix(settings: PolicySettings) -> Policy:
    return _pooled(settings, whole=RayPrefix(), prefill=RayPrefix(), decode=RayPrefix())


def _aibrix(settings: PolicySettings) -> Policy:
    rng = random.Random(settings.seed)
    return _pooled(
        settings,
        whole=aibrix.AibrixWhole(rng=rng),
        prefill=aibrix.AibrixPrefill(rng=rng),
        decode=aibrix.AibrixDecode(rng=rng),
    )


POLICIES: Mapping[str, Factory] = MappingProxyType(
    {
        "predictive": Predictive,
        "random": _random,
        "round_robin": _round_robin,
        "power_of_two": _power_of_two,
        "least_load": _least_load,
        "longest_prefix": _longest_prefix,
        "sglang_cache_aware": _sglang(CacheAware),
        "sglang_cache_aware_events": _sglang(CacheAwareEvents),
        "dynamo": _dynamo(dynamo.DynamoLinear),
        "dynamo_lmetric": _dynamo(dynamo.DynamoLmetric),
        "llm_d": _llm_d,
        "ray_prefix": _ray_prefix,
        "aibrix": _aibrix,
        "mooncake": Mooncake,
        "oracle": Oracle,
    }
)
