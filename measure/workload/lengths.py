"""Distributions of lengths and times, as written in YAML or on a command line.

    300                          always 300
    uniform:20,60                between 20 and 60, both included
    normal:300,40                mean, standard deviation
    lognormal:400,0.8            median, standard deviation of the logarithm
    exponential:5                mean
    lognormal:400,0.8,max=4096   clamped to a bound; also min=

A value is the quantile at a number between 0 and 1, so that each value takes one random number, whatever the
distribution, and a run with longer prompts has otherwise the same requests.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from statistics import NormalDist
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

_GRAMMAR = "a number, or one of " + ", ".join(
    ("uniform:LOW,HIGH", "normal:MEAN,SD", "lognormal:MEDIAN,SIGMA", "exponential:MEAN")
)
_STANDARD_NORMAL = NormalDist()
_QUANTILES: dict[str, tuple[int, Callable[[float, float, float], float]]] = {
    "constant": (1, lambda value, _, _share: value),
    "uniform": (2, lambda low, high, share: low + share * (high - low)),
    "normal": (2, lambda mean, deviation, share: mean + deviation * _STANDARD_NORMAL.inv_cdf(share)),
    "lognormal": (2, lambda median, sigma, share: median * math.exp(sigma * _STANDARD_NORMAL.inv_cdf(share))),
    "exponential": (1, lambda mean, _, share: -mean * math.log1p(-share)),
}
"""Number of parameters, and the value that a share of all does not exceed, given the first and the last of them."""
_EPSILON = 0.5**53
"""Distance of the outermost quantiles from 0 and 1."""
_MEAN_POINTS = 20_000
"""Quantiles over which a mean is taken."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of lengths or times; `str` returns its notation."""

    kind: str
    parameters: tuple[float, ...]
    low: float | None = None
    """Lower bound, to which values are clamped."""
    high: float | None = None
    """Upper bound, to which values are clamped."""

    @property
    def is_constant(self) -> bool:
        """Whether it has a single value."""
        return self.kind == "constant"

    @property
    def least(self) -> float:
        """Least value that may be drawn."""
        return self.quantile(_EPSILON)

    @property
    def most(self) -> float:
        """Largest value that may be drawn."""
        return self.quantile(1 - _EPSILON)

    def quantile(self, share: float) -> float:
        """Return the value that a share (above 0, below 1) of all values does not exceed."""
        _, quantile = _QUANTILES[self.kind]
        return self._bounded(quantile(self.parameters[0], self.parameters[-1], share))

    def count_at(self, share: float) -> int:
        """Return the quantile as a count: rounded, at least 1. Uniform counts are equally frequent."""
        if self.kind == "uniform":
            first, last = math.ceil(self.parameters[0]), math.floor(self.parameters[1])
            if last >= first:
                return max(1, round(self._bounded(first + math.floor(share * (last - first + 1)))))
        return max(1, round(self.quantile(share)))

    def draw(self, random: Random) -> float:
        """Return a value."""
        return self.quantile(_share(random))

    def draw_count(self, random: Random) -> int:
        """Return a value as a count; see `count_at`."""
        return self.count_at(_share(random))

    @property
    def mean_count(self) -> float:
        """Mean of the counts; exact for constants and integers, otherwise to about a thousandth."""
        return _mean_count(self)

    def _bounded(self, value: float) -> float:
        if self.low is not None:
            value = max(value, self.low)
        return value if self.high is None else min(value, self.high)

    def __str__(self) -> str:
        bounds = [f"{name}={value:g}" for name, value in (("min", self.low), ("max", self.high)) if value is not None]
        if self.is_constant:
            return ",".join((f"{self.parameters[0]:.15g}", *bounds))
        return f"{self.kind}:" + ",".join((*(f"{value:.15g}" for value in self.parameters), *bounds))


@lru_cache(maxsize=256)
def _mean_count(distribution: Distribution) -> float:
    if distribution.is_constant:
        return distribution.count_at(0.5)
    points = ((index + 0.5) / _MEAN_POINTS for index in range(_MEAN_POINTS))
    return math.fsum(distribution.count_at(point) for point in points) / _MEAN_POINTS


def _share(random: Random) -> float:
    return (random.getrandbits(53) + 0.5) * _EPSILON


def parse_distribution(value: object) -> Distribution:
    """Return the distribution that a number or a string denotes. Raises ValueError with the reason."""
    if isinstance(value, Distribution):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be {_GRAMMAR}; not {value!r}")
    kind, colon, rest = str(value).partition(":")
    if not colon:
        kind, rest = "constant", kind
    kind = kind.strip()
    if kind not in _QUANTILES:
        raise ValueError(f"{kind!r} is not a distribution: must be {_GRAMMAR}")
    parameters: list[float] = []
    bounds: dict[str, float] = {}
    for part in rest.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals:
            parameters.append(_number(name, whole=str(value)))
        elif name in ("min", "max") and name not in bounds:
            bounds[name] = _number(number, whole=str(value))
        else:
            raise ValueError(f"{value!r}: {name}= is unknown or repeated; there are min= and max=")
    num_parameters, _ = _QUANTILES[kind]
    if len(parameters) != num_parameters:
        raise ValueError(f"{value!r}: {kind} takes {num_parameters} numbers, not {len(parameters)}")
    distribution = Distribution(kind, tuple(parameters), bounds.get("min"), bounds.get("max"))
    _check(distribution, str(value))
    return distribution


def _number(text: str, *, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{whole!r}: {text!r} is not a number; must be {_GRAMMAR}") from None
    if not math.isfinite(number):
        raise ValueError(f"{whole!r}: {text!r} is not finite")
    return number


def _check(distribution: Distribution, text: str) -> None:
    first, last = distribution.parameters[0], distribution.parameters[-1]
    match distribution.kind:
        case "uniform" if last < first:
            raise ValueError(f"{text!r}: its upper end is below its lower end")
        case "normal" | "lognormal" if last < 0:
            raise ValueError(f"{text!r}: its spread is negative")
        case "lognormal" | "exponential" if first <= 0:
            raise ValueError(f"{text!r}: must have a positive first number")
    low, high = distribution.low, distribution.high
    if low is not None and high is not None and high < low:
        raise ValueError(f"{text!r}: max is below min")


def _check_count(distribution: Distribution) -> Distribution:
    if distribution.most < 1:
        raise ValueError(f"{str(distribution)!r} never reaches 1")
    if distribution.is_constant and distribution.parameters[0] != int(distribution.parameters[0]):
        raise ValueError(f"{str(distribution)!r} is not a whole number")
    return distribution


def _check_seconds(distribution: Distribution) -> Distribution:
    if distribution.least < 0 and distribution.kind != "normal":
        raise ValueError(f"{str(distribution)!r} includes negative times")
    return distribution


_written = (BeforeValidator(parse_distribution), PlainSerializer(str, return_type=str))
Count = Annotated[Distribution, *_written, AfterValidator(_check_count)]
"""Field of a specification: a distribution of whole numbers from 1."""
Seconds = Annotated[Distribution, *_written, AfterValidator(_check_seconds)]
"""Field of a specification: a distribution of times; negative values of a normal distribution count as 0."""
