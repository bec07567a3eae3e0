"""The load that a pool can carry within the objectives, and the smallest pools that carry a load.

Both kinds of capacity come from timing models and the distribution of requests (prefill_capacity.py,
decode_capacity.py). If routers let decode workers compute prompts while their gaps allow it, their spare time helps
prefill.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.slo import Slo

MAX_WORKERS = 1024
"""Largest pool considered."""
_RATE_PRECISION = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """The objectives of one pool."""

    slo: Slo
    attainment: float
    """Share of requests that must meet the objective, among those that could on an idle cluster."""
    max_utilization: float
    """Limit for a prefill worker's time even with short waits; for a decode step's if its objective is unreachable."""


class PoolCapacity(Protocol):
    """The load that one pool carries."""

    def holds(self, num_workers: int, rate: float) -> bool:
        """Return whether that many workers serve `rate` requests a second within the objectives. Monotone in both."""
        ...


def workers_for(capacity: PoolCapacity, rate: float) -> int:
    """Return the smallest pool that carries `rate` requests a second, from 1 to MAX_WORKERS."""
    return _first(lambda num_workers: capacity.holds(num_workers, rate), at_most=MAX_WORKERS)


def rate_of(capacity: PoolCapacity, num_workers: int) -> float:
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


def best_split(
    prefill: PoolCapacity, decode: PoolCapacity, num_workers: int, *, least: tuple[int, int]
) -> tuple[int, int]:
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
