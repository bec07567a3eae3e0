"""Formats numbers for cards, tables and ticks."""

import math

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits and separated thousands: 0.0123, 1.5, 12,345."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float, digits: int = 3) -> str:
    """Return a time with its unit: 350 µs, 12.3 ms, 1.5 s, 240 s."""
    if 0 < abs(seconds) < 0.9995e-3:
        return f"{number(seconds * 1e6, digits)} µs"
    if 0 < abs(seconds) < 0.9995:
        return f"{number(seconds * 1e3, digits)} ms"
    return f"{number(seconds, digits)} s"


def scaled(value: float, unit: str = "", digits: int = 3) -> str:
    """Return a large number with its prefix: 1.5 GB, 32 k."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{number(value / factor, digits)} {prefix}{unit}"
    return f"{number(value, digits)} {unit}".rstrip()


def percent(share: float, digits: int = 1) -> str:
    """Return a share as percent: 99.2 %."""
    return f"{100 * share:.{digits}f} %"


def count(value: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: 1 request, 1,200 requests."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def rate(value: float) -> str:
    """Return a rate: 1.5/s."""
    return f"{number(value)}/s"


def change(ratio: float) -> str:
    """Return a ratio as a change: +12 %."""
    return f"{100 * (ratio - 1):+.0f} %"
