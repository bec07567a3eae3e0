"""Numbers of findings in words."""

import math
from collections.abc import Iterable

from measure.experiment.payoff import LoadReach
from measure.load.estimates import Estimate
from measure.pages.wording import number


def reach_text(reach: LoadReach) -> str:
    """Return a reach with its interval."""
    if reach.load == 0:
        return "less than the lowest load"
    if math.isinf(reach.load):
        return f"more than {rate(reach.highest)}, the highest load (95 %: at least {number(reach.low)})"
    high = "more" if reach.high is None else number(reach.high)
    return f"{rate(reach.load)} (95 %: {number(reach.low)} to {high})"


def rate(value: float) -> str:
    """Return requests per second."""
    return f"{number(value)}/s"


def change(ratio: Estimate) -> str:
    """Return a ratio as a change, with its interval."""
    value, low, high = (change_value(each) for each in (ratio.value, ratio.low, ratio.high))
    return f"that is {value} (95 %: {low} to {high})"


def change_value(ratio: float) -> str:
    """Return a ratio as a change: +12 %."""
    return f"{100 * (ratio - 1):+.0f} %"


def ranged(estimate: Estimate) -> str:
    """Return a value with its range, if that is not empty."""
    if number(estimate.low) == number(estimate.high):
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)} to {number(estimate.high)})"


def listed(parts: Iterable[str]) -> str:
    """Return a list in words: a, b and c. At least one part."""
    *rest, last = parts
    return f"{', '.join(rest)} and {last}" if rest else last
