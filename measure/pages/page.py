"""A page about measurements, in one file that needs no network: headline figures, warnings, sections of panels.

plotly.js is inlined once, compressed; browsers from 2023 on unpack it. A figure is drawn when it comes into view, in
colours that follow the reader's light or dark mode; the buttons of its menu stand above it. The page's content policy
forbids all connections. Equal pages give equal bytes.
"""

import base64
import enum
import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import plotly.graph_objects as go
import plotly.offline
from markupsafe import Markup
from plotly.io.json import to_json_plotly

from measure.pages.theme import Ink, template

_T = TypeVar("_T")
_ASSETS = Path(__file__).parent / "assets"
_FIGURE_HEIGHT = 380
_ENTRY_PX, _LETTER_PX, _ROW_PX = 50, 7, 19  # approximate size of legend entries


class Tone(enum.StrEnum):
    """Rating of a headline figure."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"


class Width(enum.StrEnum):
    """Width of a panel in a wide window."""

    FULL = "full"
    HALF = "half"


_LEGEND_PX = {Width.FULL: 950, Width.HALF: 420}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A headline figure."""

    label: str
    value: str
    """Figure with its unit."""
    note: str = ""
    """Reference for the figure: an objective, an interval."""
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text. Columns after the first are right-aligned numbers, except for `text_columns`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: frozenset[str] = frozenset()
    strong_rows: frozenset[int] = frozenset()
    links: tuple[str, ...] = ()
    """Link of each row's first cell, relative to the page; "" for none. Empty: no row has a link."""


def table_of(items: Iterable[_T], columns: Mapping[str, Callable[[_T], str]], **look: Any) -> Table:
    """Return a table with a row for each item, whose cells the columns write; `look`: other fields of `Table`."""
    rows = tuple(tuple(write(item) for write in columns.values()) for item in items)
    return Table(columns=tuple(columns), rows=rows, **look)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Preformatted text: a command, a table of a terminal."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """A panel without data."""

    why: str


Content = go.Figure | Table | Listing | Absent


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure, table or text, with a hint on what to look for. All text is escaped."""

    title: str
    content: Any
    """A `Content`: plotly's figures have no types."""
    look_for: str = ""
    note: str = ""
    """Remark on the data shown and left out."""
    width: Width = Width.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A heading in the table of contents, and its panels."""

    title: str
    panels: tuple[Panel, ...]
    intro: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything on a page."""

    title: str
    sections: tuple[PageSection, ...]
    subtitle: str = ""
    verdict: tuple[str, ...] = ()
    """Conclusions, of a sentence or two each; at the top."""
    warnings: tuple[str, ...] = ()
    """Reasons not to trust the numbers, shown as a banner."""
    cards: tuple[Card, ...] = ()
    settings: Mapping[str, Any] | None = None
    """Description of the run as JSON, folded at the end of the page."""


def write_page(path: Path, page: Page) -> None:
    """Write a page. Raises OSError."""
    path.write_text(render_page(page), encoding="utf-8")


def render_page(page: Page) -> str:
    """Return a page as HTML."""
    figures: list[str] = []
    sections = [_section(section, index, figures) for index, section in enumerate(page.sections, 1)]
    settings = None if page.settings is None else json.dumps(page.settings, indent=2, ensure_ascii=False, default=str)
    return (
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            sections=sections,
            settings=settings,
            css=Markup(_asset("page.css")),
            js=Markup(_asset("page.js")),
            templates=Markup(_script_json({ink.value: template(ink) for ink in Ink})),
            figures=[Markup(figure) for figure in figures],
            plotly=_plotly_js() if figures else None,
        )
    )


def _section(section: PageSection, index: int, figures: list[str]) -> Mapping[str, Any]:
    panels = [_panel(panel, figures) for panel in section.panels]
    return {"id": f"section-{index}", "title": section.title, "intro": section.intro, "panels": panels}


def _panel(panel: Panel, figures: list[str]) -> Mapping[str, Any]:
    """Return the variables of a panel for the template; append the JSON of its figure to `figures`."""
    shown: dict[str, Any] = {"panel": panel, "kind": type(panel.content).__name__.lower()}
    if isinstance(panel.content, go.Figure):
        spec = panel.content.to_plotly_json()
        spec["layout"].pop("template", None)  # the page has one for each of the reader's modes
        height = spec["layout"].get("height", _FIGURE_HEIGHT) + _legend_room(spec, panel.width)
        spec["layout"]["height"] = height
        shown |= {"kind": "figure", "figure": len(figures), "height": height}
        figures.append(_script_json(spec))
    return shown


def _legend_room(spec: Mapping[str, Any], width: Width) -> int:
    """Return the height, in pixels, of a legend's rows after the first, so that many names do not flatten the plot."""
    names = [trace.get("name") or "" for trace in spec["data"] if trace.get("showlegend", True)]
    num_rows = math.ceil(sum(_ENTRY_PX + _LETTER_PX * len(name) for name in names) / _LEGEND_PX[width])
    return _ROW_PX * max(0, num_rows - 1)


def _script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    text: str = to_json_plotly(value, engine="json")
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@lru_cache(maxsize=1)
def _plotly_js() -> str:
    """Return plotly.js, compressed, in base64: 2 MB instead of 5."""
    return base64.b64encode(gzip.compress(plotly.offline.get_plotlyjs().encode(), mtime=0)).decode()


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = _unbroken
    return environment


def _unbroken(cell: str) -> str:
    """Return a cell's text, in which a line may break only between the two values of a pair."""
    return cell.replace(" ", "\u00a0").replace("\u00a0/\u00a0", "\u00a0/ ")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
