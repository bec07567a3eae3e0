"""The load that prefill workers carry: a line for one of several servers.

A request waits in one line for one of k workers, which computes it for some seconds. It is in time if wait and
computation fit into its objective, which grows with its prompt. Under load, prompts share engine steps, so a step's
constant is divided among the tokens that fill it; a single prompt pays all of it.

No closed form exists for the waits of k servers with general times, G/G/k. Allen and Cunneen's approximation scales the
exact M/M/k wait by the variability of arrivals and of service (A. O. Allen, "Probability, Statistics and Queueing
Theory", 2nd ed., 1990, section 5.3.5); it is exact for M/M/k and M/G/1. The waits of those that wait are about
exponential (Kingman's heavy-traffic limit).
"""

import math
from collections.abc import Sequence
from copy import copy
from typing import Self

from cluster.planner.capacity import Objectives
from common.demand import RequestShape
from common.timing import TimingModel


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
        """See PoolCapacity."""
        if num_workers == 0 or self.utilization(num_workers, rate) > self._max_utilization:
            return False
        return not self._slacks_s or self.attainment(num_workers, rate) >= self._attainment


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
