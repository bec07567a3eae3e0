"""Axes: quantity, unit, and the format of numbers at ticks and on hover."""

import enum
from dataclasses import dataclass
from typing import Any

_LOG_TICKS = 3
"""Rough number of ticks of a logarithmic axis: with more, plotly writes every digit between two powers of ten."""


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
        if self.scale is Scale.LOG:
            layout["nticks"] = _LOG_TICKS
        elif self.starts_at_zero:
            layout["rangemode"] = "tozero"
        return layout


RUN_TIME = Axis(title="time since the run began", unit=Unit.CLOCK)
