"""How far the model is too hopeful: learned from requests that missed the objectives where it said they would not.

Queueing formulas know nothing of requests that follow their cached prefix to a busy worker, of transfers in each
other's way, of noisy neighbours. Each such miss raises the load that a pool is planned for, a little at a time. It only
ever asks for more: what the model is too careful about is left, since finding out would cost somebody's answer.
"""

import math
from dataclasses import dataclass, field

from cluster.planner.observation import Pool
from common.demand import Demand
from common.slo import Slo

_STEP = 0.05
"""Relative, for each evidence of a miss."""
_LARGEST = 2.0
_FORGET_S = 3600.0
"""Time constant: the load of another hour may fit the model better."""
_MIN_FINISHED = 20
_NUM_SIGMAS = 2.0


@dataclass(slots=True)
class Correction:
    """Factors on the load, each from 1 to 2. Mutable."""

    factors: dict[Pool, float] = field(default_factory=lambda: dict.fromkeys(Pool, 1.0))
    _updated_s: float | None = None

    def forget(self, now_s: float) -> None:
        """Come back to the model as time goes by."""
        if self._updated_s is not None:
            left = math.exp(-(now_s - self._updated_s) / _FORGET_S)
            self.factors = {pool: 1.0 + (factor - 1.0) * left for pool, factor in self.factors.items()}
        self._updated_s = now_s

    def learn(self, demand: Demand, *, slo: Slo, predicted: float) -> None:
        """Compare with the share of good requests that the model predicts at least for the present pools.

        The pool is blamed whose objective the slowest tenth missed: decode for its gaps, else prefill.
        """
        num_finished = demand.num_finished
        if num_finished < _MIN_FINISHED:
            return
        by_chance = _NUM_SIGMAS * math.sqrt(predicted * (1.0 - predicted) / num_finished)
        if demand.num_good / num_finished >= predicted - by_chance:
            return
        is_decode = demand.itl_p90_s is not None and demand.itl_p90_s > slo.tpot_s
        pool = Pool.DECODE if is_decode else Pool.PREFILL
        self.factors[pool] = min(_LARGEST, self.factors[pool] * (1.0 + _STEP))
