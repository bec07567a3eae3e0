"""Planners by name: ours, and the rules of other systems, expressed in our terms.

    ours, ours:A               our planner, told to attain A of the requests that an idle cluster would serve in time
    ray:P:D, ray:P:D:S         Ray Serve's rule: target ongoing requests of the pools, and a downscale delay in seconds
    dynamo:S, dynamo:S:T       Dynamo's load mode with sensitivity S, which scales prefill at T seconds

Suffixes: `+noflip`: no worker changes its pool; `+startup=240`: another start-up time in seconds. Others than ours have
at most ten workers in a pool: unbounded, Ray's rule starts dozens.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.planner.plan import (
    Observation,
    ObservedWorker,
    Planner,
    PlannerSettings,
    Pool,
    PoolSizes,
    ScalingPlan,
    WorkerPhase,
)
from cluster.planner.slo_planner import SloPlanner
from common.slo import Slo
from measure.simulate.records import Elasticity

_PAID = (WorkerPhase.STARTING, WorkerPhase.SERVING)
_INTERVAL_S = 15.0
_MAX_WORKERS = 10
"""Of a pool under the rules of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLengthSettings:
    """Ray Serve's `AutoscalingConfig` of one deployment; names and defaults are its own."""

    target_ongoing_requests: float
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0


class _QueueLengthPool:
    """One pool, which knows nothing of the other one."""

    def __init__(self, settings: QueueLengthSettings) -> None:
        self._settings = settings
        self._seen: deque[tuple[float, float]] = deque()
        """(time, ongoing requests) of the look-back period."""
        self._wish = 0
        """Sign of what has been wished at every decision since `_wished_since_s`."""
        self._wished_since_s = 0.0

    def decide(self, now_s: float, num_ongoing: float, size: int) -> int:
        """Return the size to have now."""
        settings, seen = self._settings, self._seen
        seen.append((now_s, num_ongoing))
        while seen[0][0] < now_s - settings.look_back_period_s:
            seen.popleft()
        mean = sum(count for _, count in seen) / len(seen)
        error_ratio = mean / (settings.target_ongoing_requests * max(1, size))
        factor = settings.upscaling_factor if error_ratio >= 1 else settings.downscaling_factor
        desired = _clamped(math.ceil(size * (1 + (error_ratio - 1) * factor) - 1e-9))
        wish = (desired > size) - (desired < size)
        if wish != self._wish:
            self._wish, self._wished_since_s = wish, now_s
        delay_s = settings.upscale_delay_s if wish > 0 else settings.downscale_delay_s
        if not wish or now_s - self._wished_since_s < delay_s:
            return size
        self._wished_since_s = now_s  # the next one has to stand as long again
        return desired


class QueueLength:
    """Ray Serve's request-based autoscaling, each pool a deployment that is blind to the other.

    desired = ceil(size * (1 + (ongoing / (target * size) - 1) * factor)), where `ongoing` are the requests that run or
    wait, a mean over the look-back period; a wish that has stood for the delay is granted
    (`ray/serve/autoscaling_policy.py`). Requests in the router's line wait for their prompts to be computed, so they
    are the prefill pool's, as they would queue at its handle in Ray.
    """

    def __init__(self, prefill: QueueLengthSettings, decode: QueueLengthSettings) -> None:
        self._pools = {Pool.PREFILL: _QueueLengthPool(prefill), Pool.DECODE: _QueueLengthPool(decode)}

    def plan(self, observed: Observation) -> ScalingPlan:
        """See `Planner`."""
        ongoing = {pool: sum(w.num_running + w.num_waiting for w in _live(observed, pool)) for pool in Pool}
        ongoing[Pool.PREFILL] += observed.demand.num_queued
        prefill, decode = (
            self._pools[pool].decide(observed.now_s, ongoing[pool], observed.count(pool, *_PAID)) for pool in Pool
        )
        return ScalingPlan(
            sizes=PoolSizes(prefill=prefill, decode=decode),
            reason=f"{ongoing[Pool.PREFILL]} requests at prefill, {ongoing[Pool.DECODE]} at decode",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoLoadSettings:
    """Settings of NVIDIA Dynamo's SLA planner in its load mode."""

    ttft_s: float
    """Objective of a request's first token."""
    itl_s: float
    sensitivity: float = 0.8
    """A pool shrinks when all of its workers are below this share of the objective."""


class DynamoLoad:
    """The load mode of NVIDIA Dynamo's SLA planner: each worker's TTFT or ITL is estimated from what it holds now.

    One worker more when all of a pool's workers are above the objective, one less when all are below the objective
    times a sensitivity; one step in an interval, and none while a worker of the pool starts or drains. TTFT: the time
    of the prompt tokens that wait at the worker, with its share of the line's, and of one more prompt of mean length,
    in steps of the worker's budget. ITL: the time of a decode step with what runs and waits there, and half an answer
    more of context each. Both by the workers' timing models, which stand in for Dynamo's regressions of iterations.
    """

    def __init__(self, settings: DynamoLoadSettings) -> None:
        self._settings = settings

    def plan(self, observed: Observation) -> ScalingPlan:
        """See `Planner`."""
        settings = self._settings
        ttfts = self._ttfts_s(observed)
        itls = self._itls_s(observed)
        prefill = self._step(observed, Pool.PREFILL, ttfts, settings.ttft_s)
        decode = self._step(observed, Pool.DECODE, itls, settings.itl_s)
        return ScalingPlan(
            sizes=PoolSizes(prefill=prefill, decode=decode),
            reason=f"TTFT {_range(ttfts)} s, gap {_range(itls)} s",
        )

    def _step(self, observed: Observation, pool: Pool, estimates: Sequence[float], objective_s: float) -> int:
        size = observed.count(pool, *_PAID)
        if observed.count(pool, WorkerPhase.STARTING, WorkerPhase.DRAINING) or not estimates:
            return size
        if all(estimate > objective_s for estimate in estimates):
            return _clamped(size + 1)
        if all(estimate < objective_s * self._settings.sensitivity for estimate in estimates):
            return _clamped(size - 1)
        return size

    def _ttfts_s(self, observed: Observation) -> list[float]:
        shapes, workers = observed.demand.shapes, _live(observed, Pool.PREFILL)
        mean = sum(shape.num_computed_tokens for shape in shapes) / len(shapes) if shapes else 0.0
        length = sum(shape.num_prompt_tokens for shape in shapes) / len(shapes) if shapes else 0.0
        queued = observed.demand.num_queued_tokens / max(1, len(workers))
        estimates: list[float] = []
        for worker in workers:
            if worker.timing is not None:
                num_tokens = round(worker.num_pending_prefill_tokens + queued + mean)
                estimates.append(worker.timing.prompts_s(num_tokens, round(num_tokens * length / 2)))
        return estimates

    def _itls_s(self, observed: Observation) -> list[float]:
        shapes = observed.demand.shapes
        half = sum(shape.num_output_tokens for shape in shapes) / len(shapes) / 2 if shapes else 0.0
        estimates: list[float] = []
        for worker in _live(observed, Pool.DECODE):
            num_decodes = worker.num_running + worker.num_waiting
            if worker.timing is not None:
                num_context = worker.num_context_tokens + round(half * num_decodes)
                estimates.append(worker.timing.itl_s(max(1, num_decodes), num_context))
        return estimates


def _clamped(size: int) -> int:
    return min(max(size, 1), _MAX_WORKERS)


def _live(observed: Observation, pool: Pool) -> list[ObservedWorker]:
    return [w for w in observed.workers if w.pool is pool and w.phase is WorkerPhase.SERVING]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}" if values else "unknown"


class PlannerError(ValueError):
    """A planner's name is not known; the message says what is."""


def planning_by(name: str, slo: Slo) -> Elasticity:
    """Return the planner of a name, and how the pools change. Raises PlannerError."""
    base, *suffixes = name.split("+")
    kind, *numbers = base.split(":")
    try:
        make_planner = _maker(kind, [float(number) for number in numbers], slo)
        elasticity = Elasticity(make_planner=make_planner, slo=slo, interval_s=_INTERVAL_S)
        if kind != "ours" or "noflip" in suffixes:
            elasticity = replace(elasticity, flip_s=None)
        for suffix in suffixes:
            if suffix != "noflip":
                elasticity = replace(elasticity, startup_s=float(suffix.removeprefix("startup=")))
    except ValueError:
        raise PlannerError(
            f"{name!r} is not a planner; say ours, ours:0.9, ray:2:16 or dynamo:0.8, with the suffixes +noflip or"
            " +startup=240"
        ) from None
    return elasticity


def _maker(kind: str, numbers: Sequence[float], slo: Slo) -> Callable[[], Planner]:
    """Return what makes a planner. Raises ValueError for another kind or number of numbers."""
    match kind, len(numbers):
        case "ours", 0 | 1:
            ours = PlannerSettings(slo=slo, interval_s=_INTERVAL_S)
            ours = replace(ours, attainment=numbers[0]) if numbers else ours
            return lambda: SloPlanner(ours)
        case "ray", 2 | 3:
            each = QueueLengthSettings(target_ongoing_requests=numbers[0])
            prefill = each if len(numbers) == 2 else replace(each, downscale_delay_s=numbers[2])
            decode = replace(prefill, target_ongoing_requests=numbers[1])
            return lambda: QueueLength(prefill, decode)
        case "dynamo", 1 | 2:
            ttft_s = numbers[1] if len(numbers) == 2 else slo.ttft_s
            load = DynamoLoadSettings(ttft_s=ttft_s, itl_s=slo.tpot_s, sensitivity=numbers[0])
            return lambda: DynamoLoad(load)
    raise ValueError(kind)
