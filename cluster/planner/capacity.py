"""The load that a pool can carry within the objectives, from timing models and the distribution of requests.

Prefill: a request waits in one line for one of k workers, which computes it for some seconds (`queueing`). It is in
time if wait and computation fit into its objective, which grows with its prompt. Under load, prompts share engine
steps, so a step's constant is divided among the tokens that fill it; a single prompt pays all of it.

Decode: a step takes a + sum of q over its sequences, where q grows with a sequence's KV. A pool with a load of r tokens
a second and worker settles where sequences = r * step (Little's law), which gives step = a / (1 - r * q). The number of
sequences and their KV vary: a quantile of this compound sum must fit into the gap between tokens, the KV pages and the
batch. It varies more than a Poisson sum, since a batch that happens to be large has longer steps and so stays large for
longer. With steps shared like that the number of sequences follows generalized processor sharing for any distribution
of lengths (J. W. Cohen, Acta Informatica 12, 1979): negative binomial if all are equal, with a variance of
1 / (1 - r * q) times the mean. If they are not, the variance of the sum of q grows by the same factor, linearized about
its mean.

If routers let decode workers compute prompts while their gaps allow it, their spare time helps prefill.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Protocol, Self

from cluster.planner.queueing import erlang_c, mean_wait_of_waiting_s
from common.demand import RequestShape
from common.slo import Slo
from common.timing import TimingModel

MAX_WORKERS = 1024
"""Largest pool considered."""
_KV_SHARE = 0.95
"""Share of the pages that sequences may fill, since allocation needs some slack."""
_RATE_PRECISION = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """The objectives of one pool."""

    slo: Slo
    attainment: float
    """Share of requests that must meet the objective, among those that could on an idle cluster."""
    max_utilization: float
    """Limit for a prefill worker's time even with short waits; for a decode step's if its objective is unreachable."""


class Capacity(Protocol):
    """The load that one pool carries."""

    def holds(self, num_workers: int, rate: float) -> bool:
        """Return whether that many workers serve `rate` requests a second within the objectives. Monotone in both."""
        ...


class PrefillCapacity:
    """The load that prefill workers carry. Immutable."""

    def __init__(
        self, timing: TimingModel, shapes: Sequence[RequestShape], objectives: Objectives, *, burstiness: float = 1.0
    ) -> None:
        """`shapes` is not empty; `burstiness`: variance over mean of the number of arrivals, 1 for Poisson."""
        self._num_helpers = 0.0
        assert shapes, "no requests to learn from"
        self._max_utilization = objectives.max_utilization
        self._burstiness = burstiness
        works_s = [_shared_prefill_s(timing, shape) for shape in shapes]
        self.mean_work_s = sum(works_s) / len(works_s)
        """Mean worker time per request under load."""
        second_moment = sum(work_s * work_s for work_s in works_s) / len(works_s)
        self._scv = second_moment / self.mean_work_s**2 - 1.0 if self.mean_work_s > 0.0 else 0.0
        slacks_s = (objectives.slo.ttft_of(shape.num_prompt_tokens) - _prefill_s(timing, shape) for shape in shapes)
        self._slacks_s = sorted(slack_s for slack_s in slacks_s if slack_s >= 0.0)
        self.reachable = len(self._slacks_s) / len(shapes)
        """Share of requests that an idle worker serves in time."""
        self._attainment = objectives.attainment

    def helped_by(self, num_helpers: float) -> Self:
        """Return the capacity with the spare time of that many other workers added."""
        helped = copy(self)
        helped._num_helpers = num_helpers  # noqa: SLF001 - same class
        return helped

    def utilization(self, num_workers: int, rate: float) -> float:
        """Return the share of its time that each worker computes; above 1 the line grows without bound."""
        return rate * self.mean_work_s / (num_workers + self._num_helpers) if num_workers else math.inf

    def attainment(self, num_workers: int, rate: float) -> float:
        """Return the predicted share of requests in time, among those that an idle worker serves in time.

        Fractions of a worker are interpolated linearly.
        """
        whole, part = divmod(num_workers + self._num_helpers, 1.0)
        below, above = self._attainment_of(int(whole), rate), self._attainment_of(int(whole) + 1, rate)
        return below + part * (above - below)

    def _attainment_of(self, num_workers: int, rate: float) -> float:
        load = rate * self.mean_work_s
        if not self._slacks_s or load >= num_workers:
            return 0.0
        wait_s = mean_wait_of_waiting_s(
            num_workers,
            load,
            mean_service_s=self.mean_work_s,
            arrival_scv=self._burstiness,
            service_scv=self._scv,
        )
        if wait_s <= 0.0:
            return 1.0
        mean_late = sum(math.exp(-slack_s / wait_s) for slack_s in self._slacks_s) / len(self._slacks_s)
        return 1.0 - erlang_c(num_workers, load) * mean_late

    def holds(self, num_workers: int, rate: float) -> bool:
        """See Capacity."""
        if num_workers == 0 or self.utilization(num_workers, rate) > self._max_utilization:
            return False
        return not self._slacks_s or self.attainment(num_workers, rate) >= self._attainment


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

    def mean_itl_s(self, num_workers: int, rate: float) -> float:
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
        itl_s = self.mean_itl_s(num_workers, rate)
        return rate * self.mean_output_tokens * itl_s if rate else 0.0

    def high_itl_s(self, num_workers: int, rate: float) -> float:
        """Return the gap between tokens that the required share of requests does not exceed."""
        return self._step_s + self._high(self._cost_s, num_workers, rate) / max(1, num_workers)

    def _high(self, moments: _Moments, num_workers: int, rate: float) -> float:
        """Return the quantile of the sequences' joint use that the required share does not exceed."""
        running = self.num_sequences(num_workers, rate)
        if running == math.inf:
            return math.inf
        return moments.quantile(running, self._z, spread=self._slowdown(num_workers, rate))

    def num_spare(self, num_workers: int, rate: float) -> float:
        """Return the spare time, in workers, until the mean gap reaches its objective."""
        return num_workers * max(0.0, 1.0 - self.mean_itl_s(num_workers, rate) / self._objectives.slo.tpot_s)

    def kv_share(self, num_workers: int, rate: float) -> float:
        """Return the quantile of the share of pages in use."""
        return self._high(self._pages, num_workers, rate) / max(1, num_workers * self._room.num_blocks)

    def holds(self, num_workers: int, rate: float) -> bool:
        """See Capacity."""
        if num_workers == 0 or self.kv_share(num_workers, rate) > _KV_SHARE:
            return False
        limit = self._room.max_running
        if limit is not None and self._high(_ONE, num_workers, rate) > limit * num_workers:
            return False
        if not self.is_reachable:
            return self._busy(num_workers, rate) <= self._objectives.max_utilization
        return self.high_itl_s(num_workers, rate) <= self._objectives.slo.tpot_s


def workers_for(capacity: Capacity, rate: float) -> int:
    """Return the smallest pool that carries `rate` requests a second, from 1 to MAX_WORKERS."""
    return _first(lambda num_workers: capacity.holds(num_workers, rate), at_most=MAX_WORKERS)


def rate_of(capacity: Capacity, num_workers: int) -> float:
    """Return the requests a second that a pool carries within the objectives."""
    if not capacity.holds(num_workers, 0.0):
        return 0.0
    low, high = 0.0, 1.0
    while capacity.holds(num_workers, high):
        low, high = high, high * 2.0
        if high > 1e9:  # requests without cost
            return math.inf
    while high - low > _RATE_PRECISION * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if capacity.holds(num_workers, middle) else (low, middle)
        if high < 1e-9:
            return 0.0
    return low


def best_split(prefill: Capacity, decode: Capacity, num_workers: int, *, least: tuple[int, int]) -> tuple[int, int]:
    """Return the (prefill, decode) sizes, together `num_workers`, that carry the most requests a second.

    `least` are the smallest sizes allowed; their sum is at most `num_workers`. A request needs both pools, so more
    prefill workers help until decode is the bottleneck. This crossing is searched for.
    """
    least_prefill, least_decode = least
    span = num_workers - least_prefill - least_decode
    assert span >= 0, f"{least} do not fit into {num_workers}"

    def carried(offset: int) -> tuple[float, float]:
        return rate_of(prefill, least_prefill + offset), rate_of(decode, num_workers - least_prefill - offset)

    def is_beyond(offset: int) -> bool:
        of_prefill, of_decode = carried(offset)
        return of_prefill >= of_decode

    crossing = _first(lambda position: is_beyond(position - 1), at_most=span + 1) - 1
    offset = max({crossing, max(0, crossing - 1)}, key=lambda each: (min(carried(each)), -each))
    return least_prefill + offset, num_workers - least_prefill - offset


def _first(holds: Callable[[int], bool], *, at_most: int) -> int:
    """Return the smallest number from 1 on for which a monotone condition holds, else `at_most`."""
    high = 1
    while high < at_most and not holds(high):  # most pools are small, and large ones are costly to evaluate
        high = min(high * 2, at_most)
    return bisect_left(range(high), x=True, lo=high // 2 + 1, key=holds)


def _prefill_s(timing: TimingModel, shape: RequestShape) -> float:
    """Return the time in which an idle worker computes a prompt, and the step that decodes its first token."""
    num_new = shape.num_computed_tokens
    return timing.prefill_s(num_new, max(0, shape.num_prompt_tokens - num_new))


def _shared_prefill_s(timing: TimingModel, shape: RequestShape) -> float:
    """Return a prompt's share of full steps."""
    num_new = shape.num_computed_tokens
    num_steps = timing.num_prefill_steps(num_new) if num_new > 0 else 0
    num_full_steps = num_new / max(1, timing.max_step_tokens)
    return max(0.0, _prefill_s(timing, shape) - (num_steps - num_full_steps) * timing.prefill.constant_s)
