"""What a planner is to keep to."""

from dataclasses import dataclass, field

from cluster.planner.observation import Pool
from common.slo import Slo

DECODE_HELP = 0.75
"""Where the routers' policy lets decode workers compute prompts. In the replay of production traffic under
`predictive` it explains what twelve fixed splits attained (`benchmarks/results/planner.md`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one pool's size."""

    smallest: int = 1
    largest: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.smallest <= self.largest:
            raise ValueError(f"smallest {self.smallest} and largest {self.largest} are no limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Objectives, limits and patience."""

    slo: Slo
    attainment: float = 0.9
    """Share of requests that are to meet both objectives, of those that could on an idle cluster."""
    prefill: Limits = field(default_factory=Limits)
    decode: Limits = field(default_factory=Limits)
    max_workers: int = 128
    """In both pools together."""
    max_utilization: float = 0.85
    """Of a prefill worker's time: what is left is for what the forecast does not know."""
    decode_help: float = DECODE_HELP
    """Share of the time that decode workers could spare within their objective in which they compute prompts; 0 where
    the routers' policy never lets them."""
    slack_to_shrink: float = 0.1
    """A pool shrinks only if it would carry this share more than is expected: the hysteresis."""
    interval_s: float = 10.0
    """Between two plans."""
    stable_s: float = 60.0
    """For how long a smaller pool must have been enough before the pool shrinks; never less than a worker's start and
    drain together take."""
    cooldown_s: float = 30.0
    """Without a change of sizes before a pool shrinks."""
    growth: float = 0.5
    """Most that a pool grows in one plan, as a share of its size; two workers are always allowed."""
    memory_s: float = 300.0
    """For how long arrival rates and shapes of requests are remembered."""
    backlog_drain_s: float = 60.0
    """In which time a line is to be worked off that is too long."""
    min_shapes: int = 8
    """Finished requests without which nothing is planned."""

    def __post_init__(self) -> None:
        if not 0.0 < self.attainment < 1.0:
            raise ValueError(f"attainment is {self.attainment}; it must be between 0 and 1, both excluded")
        if not 0.0 < self.max_utilization < 1.0:
            raise ValueError(f"max_utilization is {self.max_utilization}; it must be between 0 and 1, both excluded")
        if not 0.0 <= self.decode_help <= 1.0:
            raise ValueError(f"decode_help is {self.decode_help}; it must be between 0 and 1")
        if self.max_workers < self.prefill.smallest + self.decode.smallest:
            raise ValueError(f"max_workers {self.max_workers} is less than both pools' smallest sizes")

    def limits(self, pool: Pool) -> Limits:
        """Return those of a pool."""
        return self.prefill if pool is Pool.PREFILL else self.decode
