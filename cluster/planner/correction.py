"""Corrects an optimistic model: learns from requests that missed the objectives against its prediction.

Queueing formulas ignore requests that follow their cached prefix to a busy worker, competing transfers and noisy
neighbours. Each unexpected miss raises the load that a pool is planned for by a small step. The load is never lowered,
since probing for that would cost requests their objectives.
"""

import math
from dataclasses import dataclass, field

from cluster.planner.plan import Pool
from common.demand import Demand
from common.slo import Slo

_STEP = 0.05
"""Relative step for each unexpected miss."""
_LARGEST = 2.0
_FORGET_S = 3600.0
"""Time constant: another hour's load may fit the model better."""
_MIN_FINISHED = 20
_NUM_SIGMAS = 2.0


@dataclass(slots=True)
class Correction:
    """Factors on the load of each pool, from 1 to 2. Mutable."""

    factors: dict[Pool, float] = field(default_factory=lambda: dict.fromkeys(Pool, 1.0))
    _updated_s: float | None = None

    def forget(self, now_s: float) -> None:
        """Let the factors decay towards 1."""
        if self._updated_s is not None:
            left = math.exp(-(now_s - self._updated_s) / _FORGET_S)
            self.factors = {pool: 1.0 + (factor - 1.0) * left for pool, factor in self.factors.items()}
        self._updated_s = now_s

    def learn(self, demand: Demand, *, slo: Slo, predicted: float) -> None:
        """Compare the demand with the lowest share of good requests that the model predicts for the present pools.

        A miss is blamed on decode if the slowest tenth of the gaps missed their objective, else on prefill.
        """
        num_finished = demand.num_finished
        if num_finished < _MIN_FINISHED:
            return
        by_chance = _NUM_SIGMAS * math.sqrt(predicted * (1.0 - predicted) / num_finished)
        if demand.num_good / num_finished >= predicted - by_chance:
            return
        is_decode = demand.tpot_p90_s is not None and demand.tpot_p90_s > slo.tpot_s
        pool = Pool.DECODE if is_decode else Pool.PREFILL
        self.factors[pool] = min(_LARGEST, self.factors[pool] * (1.0 + _STEP))
