"""Pages are well-formed, safe with hostile texts, and self-contained."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.offline

from measure.pages.figures import Curve, Frame, line_figure
from measure.pages.page import (
    Absent,
    Card,
    Listing,
    Page,
    PageSection,
    Panel,
    Table,
    Width,
    render_page,
    write_page,
)

HOSTILE = "<script>alert('&')</script>"
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Checker(HTMLParser):
    """Checks that elements are nested and closed, and keeps attributes and texts of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.ids: list[str] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        given = dict(attrs)
        if identity := given.get("id"):
            self.ids.append(identity)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self._script = given.get("id") or "main"
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] += data


def check(page: str) -> Checker:
    """Check the structure of a page and return its parts."""
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    for tag, name, value in checker.attributes:
        assert not name.startswith("on"), f"{tag} runs {value}"
        if name in ("src", "href", "action", "data"):
            assert (value or "").startswith("#"), f"{tag} {name}={value} leads outside"
    assert not re.search(r"@import|url\(", page.split("</style>")[0])
    return checker


def make_figure(name: str = "chat") -> Any:
    x = np.linspace(0, 10, 20)
    return line_figure([Curve(name=name, x=x, y=x + 1, low=x, high=x + 2, texts=[name] * 20)], Frame())


def make_page(text: str = "plain") -> Page:
    contents = (make_figure(text), Table(columns=(text, "p99"), rows=((text, "1"),)), Listing(text=text))
    return Page(
        title=text,
        subtitle=text,
        verdict=(text,),
        warnings=(text,),
        cards=(Card(label=text, value=text, note=text),),
        sections=(
            PageSection(title=text, intro=text, panels=tuple(Panel(title=text, content=it) for it in contents)),
            PageSection(
                title="rest",
                panels=(
                    Panel(title="", content=Absent(why=text), look_for=text, note=text),
                    Panel(title="none", content=Absent(why=text)),
                ),
            ),
        ),
        settings={text: [text]},
    )


def test_page_is_well_formed_and_has_no_outside_links() -> None:
    checker = check(render_page(make_page()))
    assert {"section-1", "section-2", "settings", "figure-0", "data-0"} <= set(checker.ids)
    policy = next(value for _, name, value in checker.attributes if name == "content" and value and "default" in value)
    assert policy.startswith("default-src 'none'")


def test_page_holds_plotly_once_and_compressed() -> None:
    page = render_page(make_page())
    packed = check(page).scripts["plotly-gzip"]
    assert gzip.decompress(base64.b64decode(packed)).decode() == plotly.offline.get_plotlyjs()
    assert len(page) < 2_500_000


def test_page_uploads_no_figure() -> None:
    assert "showSendToCloud: false" in check(render_page(make_page())).scripts["main"]


def test_page_without_figures_has_no_scripts() -> None:
    page = Page(title="t", sections=(PageSection(title="s", panels=(Panel(title="p", content=Listing(text="x")),)),))
    assert check(render_page(page)).scripts == {}


def test_texts_with_tags_stay_texts() -> None:
    page = render_page(make_page(HOSTILE))
    checker = check(page)
    assert set(checker.scripts) == {"templates", "data-0", "plotly-gzip", "main"}
    assert "alert(" not in checker.scripts["main"]
    assert HOSTILE not in page
    (band, line) = json.loads(checker.scripts["data-0"])["data"]
    assert line["name"] == "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;"
    assert "<script>" not in line["hovertemplate"] + line["hovertext"][0]
    assert band["showlegend"] is False


def test_equal_pages_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_page(tmp_path / name, make_page())
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_figures_carry_no_template_of_their_own() -> None:
    figure = go.Figure(go.Scatter(x=[1], y=[1]))
    page = Page(title="t", sections=(PageSection(title="s", panels=(Panel(title="p", content=figure),)),))
    scripts = check(render_page(page)).scripts
    assert "template" not in json.loads(scripts["data-0"])["layout"]
    assert set(json.loads(scripts["templates"])) == {"light", "dark"}


def test_figure_with_many_names_is_higher() -> None:
    def height(num_curves: int) -> int:
        curves = [Curve(name=f"policy number {index}", x=[0, 1], y=[0, 1]) for index in range(num_curves)]
        panel = Panel(title="p", content=line_figure(curves, Frame(height=300)), width=Width.HALF)
        scripts = check(render_page(Page(title="t", sections=(PageSection(title="s", panels=(panel,)),)))).scripts
        return int(json.loads(scripts["data-0"])["layout"]["height"])

    assert height(2) == 300
    assert 350 < height(12) < 500
