"""Hand-made fleets and requests for tests of policies."""

from collections.abc import Mapping

from common.ids import RequestId, WorkerId
from common.timing import MIN_SAMPLES, StepModel, TimingModel
from measure.simulate.policies.registry import REPLAY_POLICIES
from router.placement.loads import PoolLoads, ProjectedLoad
from router.placement.plans import FleetView, PlacementRequest, Plan, Policy, PolicySettings

TIMING = TimingModel(
    prefill=StepModel(constant_s=0.0, per_prefill_token_s=0.001, num_samples=MIN_SAMPLES),
    decode=StepModel(constant_s=0.01, per_decode_s=0.001, num_samples=MIN_SAMPLES),
    max_step_tokens=512,
)
"""A millisecond per prompt token, and 10 ms plus a millisecond per sequence between tokens."""


def worker(name: str, *, free: int = 1000, blocks: int = 1000, **fields: object) -> ProjectedLoad:
    """Return a worker with 1000 free pages; the first letter of its name is its pool."""
    values = {"worker_id": WorkerId(name), "num_blocks": blocks, "num_free_blocks": free, "timing": TIMING, **fields}
    return ProjectedLoad(**values)  # type: ignore[arg-type]


def prefill_fleet(*workers: ProjectedLoad) -> FleetView:
    """Return a view for a request that the prefill pool answers, with these workers in it."""
    return FleetView(prefill=PoolLoads(()), decode=PoolLoads(workers), num_prefill=0)


def fleet(*workers: ProjectedLoad, num_prefill: int | None = None, block_bytes: int = 0) -> FleetView:
    """Return a view of workers named p… and d…, all of which are sources."""
    prefill = tuple(each for each in workers if each.worker_id.startswith("p"))
    return FleetView(
        prefill=PoolLoads(prefill),
        decode=PoolLoads(each for each in workers if each.worker_id.startswith("d")),
        num_prefill=len(prefill) if num_prefill is None else num_prefill,
        block_bytes=block_bytes,
        sources=frozenset(each.worker_id for each in workers),
    )


def request(num_tokens: int = 160, *, cached: Mapping[str, int] | None = None, **fields: object) -> PlacementRequest:
    """Return a request in blocks of 16 tokens."""
    values = {
        "request_id": RequestId("req"),
        "num_tokens": num_tokens,
        "block_size": 16,
        "cached_blocks": {WorkerId(name): count for name, count in (cached or {}).items()},
        **fields,
    }
    return PlacementRequest(**values)  # type: ignore[arg-type]


def policy(name: str, **settings: object) -> Policy:
    """Return a policy with these settings, which may be one for replays alone."""
    return REPLAY_POLICIES[name](PolicySettings(**settings))  # type: ignore[arg-type]


def choose(policy: Policy, request: PlacementRequest, fleet: FleetView) -> Plan:
    """Return the plan of the policy, which must not refuse."""
    plan = policy.choose(request, fleet)
    assert isinstance(plan, Plan), plan
    return plan


def decode_chosen(name: str, *workers: ProjectedLoad, cached: Mapping[str, int] | None = None, times: int = 1) -> str:
    """Return the last of several choices among decode workers without a prefill pool."""
    chosen = policy(name)
    return [choose(chosen, request(cached=cached), fleet(*workers)).answering for _ in range(times)][-1]


def costs(plan: Plan) -> dict[str, float]:
    """Return the explained costs by the worker that computes."""
    return {each.prefill or each.answering: each.cost for each in plan.candidates()}
