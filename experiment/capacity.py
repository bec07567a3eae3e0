"""The highest load at which enough requests meet their objectives.

Two questions are kept apart. *Was this load served?* is asked run by run: the share of good requests of all runs at
that load, with Wilson's interval (E. B. Wilson, JASA 22, 1927); as soon as the interval is on one side of what is
wanted, no more runs are made. *How far can one go?* is asked of all loads together: more load cannot be served better,
so shares that rise with the load are noise, and are pooled (antitonic regression, by the number of requests). From a
first load the search doubles or halves until one load fails and one does not, and then halves the gap between them, as
a ratio.

The interval around the answer comes from Jeffreys' posterior of every load's share: drawn a thousand times, pooled and
interpolated like the measured ones. Both intervals take requests for independent. Those of one run queue behind each
other, so the intervals are the least that has to be said of the uncertainty.
"""

from collections.abc import Callable
from dataclasses import dataclass

from experiment.points import Arm, Point, Source
from experiment.spec import CapacitySpec

Probe = Callable[[float, int], Point]
"""Measures a load (requests per second) for the n-th time, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLoad:
    """All runs at one load."""

    load: float
    num_requests: int
    num_good: int
    num_runs: int
    is_clear: bool
    """Whether the share's interval is on one side of what is wanted."""

    @property
    def good_share(self) -> float:
        """Good requests of all."""
        return self.num_good / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What an arm can serve."""

    arm: Arm
    source: Source
    share: float
    """So many of the requests had to be good."""
    kinds: tuple[str, ...]
    """Of these kinds only; empty: of all."""
    load: float
    """The highest load that was measured and served; 0: none was."""
    low: float
    """95 % interval of the load at which the share of good requests falls below what is wanted."""
    high: float | None
    """None: not known, since the highest load that may be tried was served."""
    goodput_per_s: float
    """Good requests of all kinds per second at `load`."""
    probes: tuple[ProbedLoad, ...]
    """By load."""

    @property
    def goodput_per_worker(self) -> float:
        """The same by workers of both kinds."""
        return self.goodput_per_s / max(1, self.arm.num_workers)


def find_capacity(arm: Arm, source: Source, spec: CapacitySpec, *, start: float, probe: Probe) -> Capacity:
    """Search an arm's capacity from a first load. Raises whatever `probe` does."""
    raise NotImplementedError
