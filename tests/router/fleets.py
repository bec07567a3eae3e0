"""Hand-made fleets and requests for tests of policies."""

from collections.abc import Mapping

from common.ids import RequestId, WorkerId
from common.timing import StepModel, TimingModel
from router.placement.plans import FleetView, PlacementRequest, Plan, WorkerLoad
from router.placement.policies.interface import Policy, PolicySettings
from router.placement.policies.registry import make_policy

TIMING = TimingModel(
    prefill=StepModel(constant_s=0.0, per_prefill_token_s=0.001),
    decode=StepModel(constant_s=0.01, per_decode_s=0.001),
    max_step_tokens=512,
)
"""A millisecond per prompt token, and 10 ms plus a millisecond per sequence between tokens."""


def worker(name: str, *, free: int = 1000, blocks: int = 1000, **fields: object) -> WorkerLoad:
    """A worker of 1000 free pages; its name's first letter is its pool."""
    values = {"worker_id": WorkerId(name), "num_blocks": blocks, "num_free_blocks": free, "timing": TIMING, **fields}
    return WorkerLoad(**values)  # type: ignore[arg-type]


def fleet(*workers: WorkerLoad, num_prefill: int | None = None, block_bytes: int = 0) -> FleetView:
    """A view of workers called p… and d…, any of which blocks may be pulled from."""
    prefill = tuple(each for each in workers if each.worker_id.startswith("p"))
    return FleetView(
        prefill=prefill,
        decode=tuple(each for each in workers if each.worker_id.startswith("d")),
        num_prefill=len(prefill) if num_prefill is None else num_prefill,
        block_bytes=block_bytes,
        sources=frozenset(each.worker_id for each in workers),
    )


def request(num_tokens: int = 160, *, cached: Mapping[str, int] | None = None, **fields: object) -> PlacementRequest:
    """A request in blocks of 16 tokens."""
    values = {
        "request_id": RequestId("req"),
        "num_tokens": num_tokens,
        "block_size": 16,
        "cached_blocks": {WorkerId(name): count for name, count in (cached or {}).items()},
        **fields,
    }
    return PlacementRequest(**values)  # type: ignore[arg-type]


def policy(name: str, **settings: object) -> Policy:
    """A policy with some settings of its own."""
    return make_policy(name, PolicySettings(**settings))  # type: ignore[arg-type]


def choose(policy: Policy, request: PlacementRequest, fleet: FleetView) -> Plan:
    """The plan that the policy makes; it must make one."""
    plan = policy.choose(request, fleet)
    assert isinstance(plan, Plan), plan
    return plan
