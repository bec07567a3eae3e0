"""The load that decode workers carry: sequences that share their steps.

A step takes a + sum of q over its sequences, where q grows with a sequence's KV. A pool with a load of r tokens
a second and worker settles where sequences = r * step (Little's law), which gives step = a / (1 - r * q). The number of
sequences and their KV vary: a quantile of this compound sum must fit into the gap between tokens, the KV pages and the
batch. It varies more than a Poisson sum, since a batch that happens to be large has longer steps and so stays large for
longer. With steps shared like that the number of sequences follows generalized processor sharing for any distribution
of lengths (J. W. Cohen, Acta Informatica 12, 1979): negative binomial if all are equal, with a variance of
1 / (1 - r * q) times the mean. If they are not, the variance of the sum of q grows by the same factor, linearized about
its mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from cluster.planner.capacity import Objectives
from common.demand import RequestShape
from common.timing import TimingModel

_KV_SHARE = 0.95
"""Share of the pages that sequences may fill, since allocation needs some slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRoom:
    """The room in one decode worker."""

    num_blocks: int
    block_size: int
    max_running: int | None = None
    """Sequences in one step; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moments:
    """Mean and mean square of a sequence's use of some resource, over the time that sequences run."""

    mean: float
    mean_square: float

    def quantile(self, num_sequences: float, z: float, *, spread: float) -> float:
        """Return the joint use of a mean number of sequences at `z` standard deviations above the mean.

        `spread`: their variance relative to that of a Poisson number.
        """
        return num_sequences * self.mean + z * math.sqrt(num_sequences * self.mean_square * spread)


_ONE = _Moments(mean=1.0, mean_square=1.0)


class DecodeCapacity:
    """The load that decode workers carry. Immutable."""

    def __init__(
        self, timing: TimingModel, shapes: Sequence[RequestShape], objectives: Objectives, *, room: DecodeRoom
    ) -> None:
        """`shapes` is not empty."""
        assert shapes, "no requests to learn from"
        self._objectives = objectives
        self._room = room
        self._shapes = shapes
        self._step_s = timing.itl_s(0, 0)
        # The first token comes from prefill, but it needs its KV too, so it counts as decoded.
        self.mean_output_tokens = sum(shape.num_output_tokens for shape in shapes) / len(shapes)
        contexts = [shape.num_prompt_tokens + shape.num_output_tokens / 2 for shape in shapes]
        gap = timing.token_gap
        self._cost_s = self._moments([gap.per_decode_s + gap.per_context_token_s * each for each in contexts])
        self.is_reachable = self._step_s + self._cost_s.mean <= objectives.slo.tpot_s
        """Whether a single sequence is within the objective."""
        self._z = NormalDist().inv_cdf(objectives.attainment)

    @cached_property
    def _pages(self) -> _Moments:
        return self._moments(
            [-(-(shape.num_prompt_tokens + shape.num_output_tokens) // self._room.block_size) for shape in self._shapes]
        )

    def _moments(self, values: Sequence[float]) -> _Moments:
        """Weigh each request's value by its tokens, that is by its running time."""
        weights = [max(1, shape.num_output_tokens) for shape in self._shapes]
        total = sum(weights)
        return _Moments(
            mean=sum(weight * value for weight, value in zip(weights, values, strict=True)) / total,
            mean_square=sum(weight * value * value for weight, value in zip(weights, values, strict=True)) / total,
        )

    def mean_tpot_s(self, num_workers: int, rate: float) -> float:
        """Return the predicted mean gap between tokens; infinite under overload."""
        if not num_workers:
            return math.inf
        slowdown = self._slowdown(num_workers, rate)
        return self._step_s * slowdown if slowdown < math.inf else math.inf

    def _busy(self, num_workers: int, rate: float) -> float:
        """Return the share of a step that grows with its sequences; from 1 on the pool is overloaded."""
        return rate * self.mean_output_tokens / num_workers * self._cost_s.mean

    def _slowdown(self, num_workers: int, rate: float) -> float:
        """Return the mean step relative to an empty one, which is also the variance of a batch relative to Poisson."""
        busy = self._busy(num_workers, rate)
        return 1.0 / (1.0 - busy) if busy < 1.0 else math.inf

    def num_sequences(self, num_workers: int, rate: float) -> float:
        """Return how many sequences run in the pool on average (Little's law)."""
        tpot_s = self.mean_tpot_s(num_workers, rate)
        return rate * self.mean_output_tokens * tpot_s if rate else 0.0

    def high_tpot_s(self, num_workers: int, rate: float) -> float:
        """Return the mean gap between tokens that the required share of requests does not exceed."""
        return self._step_s + self._high(self._cost_s, num_workers, rate) / max(1, num_workers)

    def _high(self, moments: _Moments, num_workers: int, rate: float) -> float:
        """Return the quantile of the sequences' joint use that the required share does not exceed."""
        running = self.num_sequences(num_workers, rate)
        if running == math.inf:
            return math.inf
        return moments.quantile(running, self._z, spread=self._slowdown(num_workers, rate))

    def num_spare(self, num_workers: int, rate: float) -> float:
        """Return the spare time, in workers, until the mean gap reaches its objective."""
        return num_workers * max(0.0, 1.0 - self.mean_tpot_s(num_workers, rate) / self._objectives.slo.tpot_s)

    def kv_share(self, num_workers: int, rate: float) -> float:
        """Return the quantile of the share of pages in use."""
        return self._high(self._pages, num_workers, rate) / max(1, num_workers * self._room.num_blocks)

    def holds(self, num_workers: int, rate: float) -> bool:
        """See PoolCapacity."""
        if num_workers == 0 or self.kv_share(num_workers, rate) > _KV_SHARE:
            return False
        limit = self._room.max_running
        if limit is not None and self._high(_ONE, num_workers, rate) > limit * num_workers:
            return False
        if not self.is_reachable:
            return self._busy(num_workers, rate) <= self._objectives.max_utilization
        return self.high_tpot_s(num_workers, rate) <= self._objectives.slo.tpot_s
