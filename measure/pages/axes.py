"""Axes: what is measured, in what unit, and how its numbers are written at ticks and under the mouse."""

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from measure.pages.wording import duration, number, scaled

_MIN_TICKS, _MAX_TICKS = 3, 7
_STEPS = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
"""Multiples of powers of ten that ticks are at: the finest that give few enough."""


def even_places(low: float, high: float) -> list[float]:
    """Return about five round numbers at even distances that cover an interval; the number itself where it is one."""
    if not high > low:
        return [low]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power >= rough * (1 - 1e-9))
    return [place * step for place in range(math.floor(low / step), math.ceil(high / step) + 1)]


class Unit(enum.Enum):
    """A unit: (format of ticks, format under the mouse, suffix). Formats are d3's."""

    SECONDS = ("~s", ".3s", "s")
    """With prefixes: 20 ms, 1.5 s. Latencies."""
    CLOCK = (",~r", ",.1f", " s")
    """Seconds since something began."""
    SHARE = (".0%", ".1%", "")
    """Of 1."""
    TOKENS = ("~s", ",.0f", "")
    BYTES = ("~s", ".3s", "B")
    COUNT = (",~r", ",.0f", "")
    RATE = (",~r", ",.3~r", "/s")
    PLAIN = (",~r", ".4~r", "")

    @property
    def hover(self) -> str:
        """Format under the mouse."""
        return self.value[1]

    @property
    def suffix(self) -> str:
        """What follows the number."""
        return self.value[2]

    def shows(self, variable: str) -> str:
        """Return plotly's template for a value: `shows("x")` is "%{x:.3s}s" for seconds."""
        return f"%{{{variable}:{self.hover}}}{self.suffix}"

    def text(self, value: float) -> str:
        """Return a value as a tick has it."""
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
    """How numbers become positions."""

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
        """Return plotly's layout of it."""
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
        """Return where a logarithmic axis over these values has ticks; nothing for a linear one.

        At powers of ten, and the closer together the values are at the more multiples of them; at even distances where
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
