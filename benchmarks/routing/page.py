"""Writes tables into a page of prose, between markers."""

import re
from collections.abc import Mapping, Sequence

_END = "<!-- end -->"


class PageError(Exception):
    """A page has no place for a table; the message says what to add."""


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, which ends with a line break."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    lines.insert(1, "|---" * len(columns) + "|")
    return "\n".join(lines) + "\n"


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return a page with these tables in place of those of the same names; everything else stays. Raises PageError."""
    for name, table in tables.items():
        begin = f"<!-- table {name} -->"
        place = re.compile(rf"{re.escape(begin)}\n.*?^{re.escape(_END)}$", re.DOTALL | re.MULTILINE)
        if len(place.findall(page)) != 1:
            raise PageError(f"cannot write table {name!r}: the page needs one line {begin!r} and {_END!r} behind it")
        page = place.sub(lambda _found, text=f"{begin}\n{table}{_END}": text, page)  # type: ignore[misc]
    return page
