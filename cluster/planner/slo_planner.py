"""Sizes both pools so that the objectives hold with as few workers as possible.

1. Evidence: the arrival rate and its trend (`forecast`), the shapes of requests and the speed of workers (`evidence`).
2. Need: for each pool the smallest size that carries the rate expected when a worker requested now would serve
   (`capacity`), with a correction of the model's optimism (`correction`), plus the backlog.
3. Change (`patience`): a pool grows after two plans that agree, by a bounded share, or at once if a backlog grows too
   fast. It shrinks by one worker at a time, if the smaller size was enough for long and nothing else changes. A
   surplus worker in one pool first covers a deficit in the other, since a flip needs no start.
4. Limits: of each pool, and of both together, where the split that carries the most requests is chosen.

Without evidence nothing changes, and the reason names the missing evidence.
"""

import math
from dataclasses import dataclass, replace

from cluster.planner.capacity import best_split, rate_of, workers_for
from cluster.planner.correction import Correction
from cluster.planner.evidence import Capacities, ShapeMemory, measure, objectives_of
from cluster.planner.forecast import ArrivalForecast, RateTrend
from cluster.planner.patience import NeedHistory, PoolNeed
from cluster.planner.plan import Observation, PlannerSettings, Pool, PoolSizes, ScalingPlan, WorkerPhase
from cluster.planner.reasons import Numbers, explain, hold

_NO_FREE_PAGES = 0.1
"""Share of free pages below which waiting requests are assumed to wait for decode workers."""
_SHORTEST_WINDOW_S = 0.5
"""Shortest window that allows a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """Requests a second that one pool should be ready for."""

    expected: float
    backlog: float
    """Additional rate from the backlog."""
    is_urgent: bool
    """Whether the backlog cannot wait for a second plan."""


class SloPlanner:
    """A Planner for one cluster. Mutable."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._objectives = objectives_of(
            settings.slo, attainment=settings.attainment, max_utilization=settings.max_utilization
        )
        self._forecast = ArrivalForecast(memory_s=settings.memory_s)
        self._memory = ShapeMemory(memory_s=settings.memory_s)
        self._correction = Correction()
        self._patience = {pool: NeedHistory() for pool in Pool}
        self._present: PoolSizes | None = None
        self._changed_s = -math.inf

    def plan(self, observed: Observation) -> ScalingPlan:
        """Return the sizes that the pools should have now. See Planner."""
        present = self._note_sizes(observed)
        demand, now_s = observed.demand, observed.now_s
        if demand.window_s < _SHORTEST_WINDOW_S:
            return hold(self._limited(present), "the routers have reported nothing yet")
        self._forecast.add(
            now_s, num_arrived=demand.num_arrived, window_s=demand.window_s, burstiness=max(1.0, demand.burstiness)
        )
        self._memory.add(now_s, demand)
        shapes = self._memory.shapes
        if len(shapes) < self._settings.min_shapes:
            why = (
                f"only {len(shapes)} requests have finished, {self._settings.min_shapes} are needed to know their size"
            )
            return hold(self._limited(present), why)
        capacities = measure(observed, shapes, objectives=self._objectives)
        if isinstance(capacities, str):
            return hold(self._limited(present), capacities)
        trend = self._forecast.trend(now_s)
        capacities = self._helped(observed, capacities, trend, present)
        self._correct(observed, capacities, trend)
        rates = {pool: self._rates(observed, capacities, trend, pool) for pool in Pool}
        needs = {pool: self._need(capacities, rates[pool], observed, pool) for pool in Pool}
        wanted = self._bounded(self._wanted(observed, present, needs, rates), present, capacities)
        numbers = Numbers(
            observed=observed,
            present=present,
            capacities=capacities,
            trend=trend,
            rates={pool: rates[pool].expected + rates[pool].backlog for pool in Pool},
            needs=needs,
            corrections=self._correction.factors,
        )
        return explain(wanted, numbers, settings=self._settings)

    def _note_sizes(self, observed: Observation) -> PoolSizes:
        present = observed.sizes
        if present != self._present:
            if self._present is not None:
                self._changed_s = observed.now_s
            self._present = present
        return present

    # The need.

    def _helped(
        self, observed: Observation, capacities: Capacities, trend: RateTrend, present: PoolSizes
    ) -> Capacities:
        """Add the help of the decode workers that will remain: those needed, but at most those present."""
        rate = self._rates(observed, capacities, trend, Pool.DECODE).expected
        num_decode = min(present.decode, workers_for(capacities.decode, rate))
        num_helpers = self._settings.decode_help * capacities.decode.num_spare(num_decode, rate)
        return replace(capacities, prefill=capacities.prefill.helped_by(num_helpers))

    def _correct(self, observed: Observation, capacities: Capacities, trend: RateTrend) -> None:
        """Learn from a window without changes in which the model predicted no misses."""
        self._correction.forget(observed.now_s)
        if observed.now_s - self._changed_s < observed.demand.window_s + self._settings.interval_s:
            return
        if any(worker.phase is not WorkerPhase.SERVING for worker in observed.workers):
            return
        factors = self._correction.factors
        prefill, decode = (observed.count(pool, WorkerPhase.SERVING) for pool in Pool)
        if not capacities.prefill.holds(prefill, trend.rate * factors[Pool.PREFILL]):
            return
        if not capacities.decode.holds(decode, trend.rate * factors[Pool.DECODE]):
            return
        reachable = capacities.prefill.reachable if capacities.decode.is_reachable else 0.0
        self._correction.learn(observed.demand, slo=self._settings.slo, predicted=self._settings.attainment * reachable)

    def _rates(self, observed: Observation, capacities: Capacities, trend: RateTrend, pool: Pool) -> _Rates:
        settings = self._settings
        # Two more plans confirm the need before a worker is requested.
        horizon_s = observed.startup_s.get(pool, 0.0) + 2 * settings.interval_s
        expected = trend.ahead(horizon_s) * self._correction.factors[pool]
        num_waiting = self._num_waiting(observed, capacities, pool)
        num_serving = max(1, observed.count(pool, WorkerPhase.SERVING))
        if pool is Pool.PREFILL:
            num_usual = num_serving * settings.slo.ttft_s / max(capacities.prefill.mean_work_s, 1e-9)
        else:
            num_usual = trend.rate * settings.slo.ttft_s
        excess = max(0.0, num_waiting - num_usual)
        return _Rates(
            expected=expected,
            backlog=excess / settings.backlog_drain_s,
            is_urgent=excess > num_usual,
        )

    def _num_waiting(self, observed: Observation, capacities: Capacities, pool: Pool) -> float:
        """Return the backlog of a pool in typical requests."""
        demand = observed.demand
        decode = [worker for worker in observed.workers if worker.pool is Pool.DECODE]
        num_blocks = sum(worker.num_blocks for worker in decode)
        is_full = num_blocks > 0 and sum(worker.num_free_blocks for worker in decode) < _NO_FREE_PAGES * num_blocks
        if pool is Pool.DECODE:
            return sum(worker.num_waiting for worker in decode) + (demand.num_queued if is_full else 0)
        shapes = self._memory.shapes
        num_computed = sum(shape.num_computed_tokens for shape in shapes)
        num_prompt = max(1, sum(shape.num_prompt_tokens for shape in shapes))
        pending: float = sum(
            worker.num_pending_prefill_tokens for worker in observed.workers if worker.pool is Pool.PREFILL
        )
        if not is_full:
            pending += demand.num_queued_tokens * num_computed / num_prompt
        return pending * len(shapes) / num_computed if num_computed else 0.0

    def _need(self, capacities: Capacities, rates: _Rates, observed: Observation, pool: Pool) -> PoolNeed:
        capacity = capacities.prefill if pool is Pool.PREFILL else capacities.decode
        limits = self._settings.limits(pool)

        def size(rate: float) -> int:
            return limits.clamp(workers_for(capacity, rate))

        grow = size(rates.expected + rates.backlog)
        with_slack = size((rates.expected + rates.backlog) * (1.0 + self._settings.slack_to_shrink))
        need = PoolNeed(time_s=observed.now_s, to_grow=grow, to_shrink=max(grow, with_slack))
        self._patience[pool].add(need, stable_s=self._stable_s(observed, pool))
        return need

    def _stable_s(self, observed: Observation, pool: Pool) -> float:
        return max(self._settings.stable_s, observed.startup_s.get(pool, 0.0) + observed.drain_s.get(pool, 0.0))

    # The change.

    def _wanted(
        self,
        observed: Observation,
        present: PoolSizes,
        needs: dict[Pool, PoolNeed],
        rates: dict[Pool, _Rates],
    ) -> dict[Pool, int]:
        sizes = {Pool.PREFILL: present.prefill, Pool.DECODE: present.decode}
        wanted = dict(sizes)
        for pool, size in sizes.items():
            grown = needs[pool].to_grow if rates[pool].is_urgent else self._patience[pool].grown
            if grown > size:
                wanted[pool] = min(grown, size + max(2, math.ceil(size * self._settings.growth)))
        for pool, other in ((Pool.PREFILL, Pool.DECODE), (Pool.DECODE, Pool.PREFILL)):
            num_short = wanted[other] - sizes[other]
            if num_short > 0:
                num_spare = max(
                    0, sizes[pool] - max(self._patience[pool].spare_now, self._settings.limits(pool).smallest)
                )
                wanted[pool] -= min(num_short, num_spare)
            elif wanted[pool] == sizes[pool] and self._may_shrink(observed, pool, sizes[pool]):
                wanted[pool] -= 1
        return wanted

    def _may_shrink(self, observed: Observation, pool: Pool, size: int) -> bool:
        enough = self._patience[pool].shrunk(self._stable_s(observed, pool))
        if enough is None or enough >= size:
            return False
        is_quiet = observed.now_s - self._changed_s >= self._settings.cooldown_s
        return is_quiet and not observed.count(pool, WorkerPhase.STARTING, WorkerPhase.DRAINING)

    def _bounded(self, wanted: dict[Pool, int], present: PoolSizes, capacities: Capacities) -> PoolSizes:
        sizes = self._limited(PoolSizes(prefill=wanted[Pool.PREFILL], decode=wanted[Pool.DECODE]))
        total = self._settings.max_workers
        if sizes.prefill + sizes.decode <= total:
            return sizes
        least = (self._settings.prefill.smallest, self._settings.decode.smallest)
        prefill, decode = best_split(capacities.prefill, capacities.decode, total, least=least)
        best = self._limited(PoolSizes(prefill=prefill, decode=decode))
        gain = 1.0 + self._settings.slack_to_shrink
        if present.prefill + present.decode == total and _carried(capacities, best) <= gain * _carried(
            capacities, present
        ):
            return self._limited(present)  # oscillating roles would serve no requests
        return best

    def _limited(self, sizes: PoolSizes) -> PoolSizes:
        """Return sizes within each pool's limits."""
        settings = self._settings
        return PoolSizes(prefill=settings.prefill.clamp(sizes.prefill), decode=settings.decode.clamp(sizes.decode))


def _carried(capacities: Capacities, sizes: PoolSizes) -> float:
    """Return the requests a second that pools of these sizes carry together."""
    return min(rate_of(capacities.prefill, sizes.prefill), rate_of(capacities.decode, sizes.decode))
