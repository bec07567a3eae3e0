"""Axes: quantity, unit, and the format of numbers at ticks and on hover."""

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from measure.pages.wording import duration, number, scaled

_MIN_TICKS, _MAX_TICKS = 3, 7
_STEPS = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
"""Multiples of powers of ten for ticks, finest first; the first that gives few enough ticks is used."""


def even_places(low: float, high: float) -> list[float]:
    """Return about five evenly spaced round numbers that cover an interval; only `low` where it is empty."""
    if not high > low:
        return [low]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power >= rough * (1 - 1e-9))
    return [place * step for place in range(math.floor(low / step), math.ceil(high / step) + 1)]


class Unit(enum.Enum):
    """A unit: (format of ticks, format on hover, suffix). Formats are d3's."""

    SECONDS = ("~s", ".3s", "s")
    """Latencies, with prefixes: 20 ms, 1.5 s."""
    CLOCK = (",~r", ",.1f", " s")
    """Seconds since something began."""
    SHARE = (".0%", ".1%", "")
    """Share of 1, as percent."""
    TOKENS = ("~s", ",.0f", "")
    BYTES = ("~s", ".3s", "B")
    COUNT = (",~r", ",.0f", "")
    RATE = (",~r", ",.3~r", "/s")
    PLAIN = (",~r", ".4~r", "")

    @property
    def hover(self) -> str:
        """Format on hover."""
        return self.value[1]

    @property
    def suffix(self) -> str:
        """Text after the number."""
        return self.value[2]

    def shows(self, variable: str) -> str:
        """Return plotly's template for a variable: `shows("x")` is "%{x:.3s}s" for seconds."""
        return f"%{{{variable}:{self.hover}}}{self.suffix}"

    def text(self, value: float) -> str:
        """Return the text of a tick at a value."""
        match self:
            case Unit.SECONDS:
                return duration(value)
            case Unit.TOKENS | Unit.BYTES:
                return scaled(value, self.suffix)
            case Unit.SHARE:
                return f"{number(100 * value)}%"
            case _:
                return number(value) + self.suffix


class Scale(enum.StrEnum):
    """Scale of an axis."""

    LINEAR = "linear"
    LOG = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a figure."""

    title: str = ""
    unit: Unit = Unit.PLAIN
    scale: Scale = Scale.LINEAR
    starts_at_zero: bool = False

    def layout(self) -> dict[str, Any]:
        """Return plotly's layout of the axis."""
        tick_format, _, suffix = self.unit.value
        layout: dict[str, Any] = {
            "title": {"text": self.title},
            "type": self.scale.value,
            "tickformat": tick_format,
            "ticksuffix": suffix,
        }
        if self.starts_at_zero and self.scale is Scale.LINEAR:
            layout["rangemode"] = "tozero"
        return layout

    def ticks(self, values: npt.NDArray[np.float64]) -> dict[str, Any]:
        """Return the ticks of a logarithmic axis over these values; nothing for a linear one.

        Ticks are at powers of ten, with more multiples of them the closer the values are; evenly spaced where the
        values are closer still.
        """
        positive = values[values > 0]
        if self.scale is Scale.LINEAR or not positive.size:
            return {}
        low, high = float(positive.min()), float(positive.max())
        powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        for steps in _STEPS:
            places = [step * power for power in powers for step in steps]
            num_ticks = sum(low <= place <= high for place in places)
            if num_ticks <= _MAX_TICKS:
                break
        if num_ticks < _MIN_TICKS:
            places = even_places(low, high)
        return {"tickvals": places, "ticktext": [self.unit.text(place) for place in places], "ticksuffix": ""}


RUN_TIME = Axis(title="time since the run began", unit=Unit.CLOCK)
