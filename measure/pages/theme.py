"""Colours and looks that all figures share, so that a colour has one meaning on all pages.

Colours are from Paul Tol's schemes ("Colour Schemes", SRON technical note EPS/TN/09-002): distinguishable with all
common kinds of colour blindness, legible on light and dark.
"""

import enum
from collections.abc import Iterable
from typing import Any

BLUE, ORANGE, TEAL, MAGENTA, CYAN = "#0077bb", "#ee7733", "#009988", "#ee3377", "#33bbee"
PURPLE, SAND, OLIVE, GREY, RED = "#aa4499", "#ddaa33", "#999933", "#8b929c", "#dd3d2d"

PALETTE = (BLUE, ORANGE, TEAL, MAGENTA, CYAN, PURPLE, SAND, OLIVE)
"""Colours of arms, kinds and workers, in this order. Red is reserved for failures and limits."""
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
LIMIT = RED

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Phase(enum.StrEnum):
    """Phase of a request."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    OTHER = "other"


PHASE_COLORS = {
    Phase.QUEUE: SAND,
    Phase.PREFILL: BLUE,
    Phase.TRANSFER: MAGENTA,
    Phase.DECODE: TEAL,
    Phase.OTHER: GREY,
}


class Ink(enum.StrEnum):
    """Mode of the reader's browser."""

    LIGHT = "light"
    DARK = "dark"


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, in order of first appearance; colours repeat after the end of the palette."""
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(dict.fromkeys(names))}


def dash_of(index: int) -> str:
    """Return the dash of the `index`-th line, which changes each time the colours repeat."""
    return DASHES[index // len(PALETTE) % len(DASHES)]


def symbol_of(index: int) -> str:
    """Return the marker of the `index`-th series: never the same twice in one colour."""
    return SYMBOLS[(index + index // len(PALETTE)) % len(SYMBOLS)]


def translucent(color: str, alpha: float) -> str:
    """Return "#rrggbb" as a colour with opacity `alpha`."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def template(ink: Ink) -> dict[str, Any]:
    """Return plotly's template of our style."""
    text, line, zero, paper = (
        ("#24292f", "#e3e7ec", "#c3c9d1", "#ffffff")
        if ink is Ink.LIGHT
        else ("#d5dbe3", "#2d3540", "#4b5563", "#171c23")
    )
    axis = {
        "gridcolor": line,
        "linecolor": zero,
        "zerolinecolor": zero,
        "zerolinewidth": 1,
        "ticks": "outside",
        "tickcolor": zero,
        "ticklen": 4,
        "title": {"standoff": 8, "font": {"size": 13}},
        "automargin": True,
    }
    return {
        "layout": {
            "colorway": list(PALETTE),
            "font": {"family": _FONT, "size": 12.5, "color": text},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "margin": {"l": 60, "r": 20, "t": 40, "b": 50},
            "hoverlabel": {"bgcolor": paper, "bordercolor": zero, "font": {"color": text}, "align": "left"},
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": zero, "activecolor": text},
            "xaxis": axis,
            "yaxis": axis,
            "hovermode": "closest",
            "showlegend": True,
            "bargap": 0.15,
        }
    }
