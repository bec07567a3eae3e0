"""The load that prefill workers carry: a line for one of several servers.

A request waits in one line for one of k workers, which computes it for some seconds. It is in time if wait and
computation fit into its objective, which grows with its prompt. Under load, prompts share engine steps, so a step's
constant is divided among the tokens that fill it; a single prompt pays all of it. Tiers of the pool bring part of a
prompt back: a read takes time of the request, but none of the worker's (`tier_hits.py`).

No closed form exists for the waits of k servers with general times, G/G/k. Allen and Cunneen's approximation scales the
exact M/M/k wait by the variability of arrivals and of service (A. O. Allen, "Probability, Statistics and Queueing
Theory", 2nd ed., 1990, section 5.3.5); it is exact for M/M/k and M/G/1. The waits of those that wait are about
exponential (Kingman's heavy-traffic limit).
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

from cluster.planner.capacity import Objectives
from cluster.planner.tier_hits import NO_TIERS, TierHits
from common.demand import RequestShape
from common.slo import Slo
from common.timing import TimingModel


class PrefillCapacity:
    """The load that prefill workers carry. Immutable."""

    def __init__(
        self,
        timing: TimingModel,
        shapes: Sequence[RequestShape],
        objectives: Objectives,
        *,
        burstiness: float = 1.0,
        tiers: TierHits = NO_TIERS,
    ) -> None:
        """`shapes` is not empty; `burstiness`: variance over mean of the number of arrivals, 1 for Poisson."""
        self._num_helpers = 0.0
        assert shapes, "no requests to learn from"
        self._timing = timing
        self._shapes = shapes
        self._objectives = objectives
        self._burstiness = burstiness
        self.tiers = tiers
        self._loads: dict[float, _Load] = {}
        """By the room in tiers."""

    @property
    def mean_work_s(self) -> float:
        """Mean worker time per request under load, in the present pool."""
        return self._load(self.tiers.num_workers).mean_work_s

    @property
    def reachable(self) -> float:
        """Share of requests that an idle worker of the present pool serves in time."""
        return len(self._load(self.tiers.num_workers).slacks_s) / len(self._shapes)

    def tier_savings(self) -> tuple["TierSaving", "TierSaving"]:
        """Return what reads from tiers spare a request now, and what tiers without an end would spare besides."""
        return (
            self._saving(lambda shape: (shape.num_computed_tokens, shape.num_read_tokens)),
            self._saving(
                lambda shape: (shape.num_computed_tokens - shape.num_evicted_tokens, shape.num_evicted_tokens)
            ),
        )

    def _saving(self, split: Callable[[RequestShape], tuple[int, int]]) -> "TierSaving":
        """`split` returns the prompt tokens that are computed in any case, and those that tiers spare."""
        num_tokens, prefill_s, read_s = 0, 0.0, 0.0
        for shape in self._shapes:
            num_computed, num_spared = split(shape)
            if num_spared:
                least, most = (replace(shape, num_computed_tokens=num_computed + more) for more in (0, num_spared))
                num_tokens += num_spared
                prefill_s += _shared_prefill_s(self._timing, most) - _shared_prefill_s(self._timing, least)
                read_s += self.tiers.read_s(num_spared)
        count = len(self._shapes)
        return TierSaving(num_tokens=num_tokens / count, prefill_s=prefill_s / count, read_s=read_s / count)

    def _load(self, num_workers: int) -> "_Load":
        room = self.tiers.room(num_workers)
        load = self._loads.get(room)
        if load is None:
            shapes = self.tiers.with_workers(self._shapes, num_workers)
            load = self._loads[room] = _Load.of(self._timing, shapes, self._objectives.slo, self.tiers)
        return load

    def helped_by(self, num_helpers: float) -> Self:
        """Return the capacity with the spare time of that many other workers added."""
        helped = copy(self)
        helped._num_helpers = num_helpers  # noqa: SLF001 - same class
        return helped

    def utilization(self, num_workers: int, rate: float) -> float:
        """Return the share of its time that each worker computes; above 1 the line grows without bound."""
        work_s = self._load(num_workers).mean_work_s
        return rate * work_s / (num_workers + self._num_helpers) if num_workers else math.inf

    def attainment(self, num_workers: int, rate: float) -> float:
        """Return the predicted share of requests in time, among those that an idle worker serves in time.

        Fractions of a worker are interpolated linearly.
        """
        load = self._load(num_workers)
        whole, part = divmod(num_workers + self._num_helpers, 1.0)
        below, above = (self._attainment_of(load, int(whole) + more, rate) for more in (0, 1))
        return below + part * (above - below)

    def _attainment_of(self, load: "_Load", num_servers: int, rate: float) -> float:
        offered = rate * load.mean_work_s
        if not load.slacks_s or offered >= num_servers:
            return 0.0
        wait_s = mean_wait_of_waiting_s(
            num_servers,
            offered,
            mean_service_s=load.mean_work_s,
            arrival_scv=self._burstiness,
            service_scv=load.scv,
        )
        if wait_s <= 0.0:
            return 1.0
        mean_late = sum(math.exp(-slack_s / wait_s) for slack_s in load.slacks_s) / len(load.slacks_s)
        return 1.0 - erlang_c(num_servers, offered) * mean_late

    def holds(self, num_workers: int, rate: float) -> bool:
        """See PoolCapacity."""
        if num_workers == 0 or self.utilization(num_workers, rate) > self._objectives.max_utilization:
            return False
        return not self._load(num_workers).slacks_s or self.attainment(num_workers, rate) >= self._objectives.attainment


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSaving:
    """What reading from tiers saves a request on average."""

    num_tokens: float
    prefill_s: float
    """Worker time that it would take to compute these tokens."""
    read_s: float
    """Time to read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """The work that requests bring to the workers of a pool."""

    mean_work_s: float
    scv: float
    """Squared coefficient of variation of the work."""
    slacks_s: Sequence[float]
    """Time to wait of each request that an idle worker serves in time, the shortest first."""

    @classmethod
    def of(cls, timing: TimingModel, shapes: Sequence[RequestShape], slo: Slo, tiers: TierHits) -> "_Load":
        works_s = [_shared_prefill_s(timing, shape) for shape in shapes]
        mean_work_s = sum(works_s) / len(works_s)
        second_moment = sum(work_s * work_s for work_s in works_s) / len(works_s)
        slacks_s = (
            slo.ttft_of(shape.num_prompt_tokens) - tiers.read_s(shape.num_read_tokens) - _prefill_s(timing, shape)
            for shape in shapes
        )
        return cls(
            mean_work_s=mean_work_s,
            scv=second_moment / mean_work_s**2 - 1.0 if mean_work_s > 0.0 else 0.0,
            slacks_s=sorted(slack_s for slack_s in slacks_s if slack_s >= 0.0),
        )


def erlang_c(num_servers: int, offered_load: float) -> float:
    """Return the share of arrivals that find every server of an M/M/k busy; 1.0 at and beyond saturation.

    `offered_load` is arrival rate times mean service time, in servers (Erlang).
    """
    if offered_load >= num_servers:
        return 1.0
    if offered_load <= 0.0:
        return 0.0
    inverse_blocking = 1.0  # Erlang B; its recursion over servers overflows to infinity only
    for server in range(1, num_servers + 1):
        inverse_blocking = 1.0 + inverse_blocking * server / offered_load
    blocking = 1.0 / inverse_blocking
    return blocking / (1.0 - offered_load / num_servers * (1.0 - blocking))


def mean_wait_of_waiting_s(
    num_servers: int, offered_load: float, *, mean_service_s: float, arrival_scv: float, service_scv: float
) -> float:
    """Return the mean wait of the requests that wait; infinite at and beyond saturation.

    The squared coefficients of variation are those of the gaps between arrivals and of service times; both 1: M/M/k.
    """
    spare_servers = num_servers - offered_load
    if spare_servers <= 0.0:
        return math.inf
    return mean_service_s / spare_servers * (arrival_scv + service_scv) / 2.0


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
