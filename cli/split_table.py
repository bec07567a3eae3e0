"""A table that stays readable on a narrow terminal: columns that do not fit beside each other go below each other."""

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_GAP = 3  # one space of padding on both sides, and the line


class SplitTable:
    """Rows of text under headers. The first column names the row and is repeated in every part."""

    def __init__(
        self, headers: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int, title: str | None = None
    ) -> None:
        """The first `num_left` columns are words, aligned left; the others are numbers, aligned right.

        A row may end early.
        """
        self._headers = headers
        self._rows = [[*row, *[""] * (len(headers) - len(row))] for row in rows]
        self._num_left = num_left
        self._title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as few tables as the width allows, an empty line between them."""
        title = self._title
        for number, columns in enumerate(self._parts(options.max_width)):
            if number:
                yield ""
            yield self._table(columns, title)
            title = None

    def _parts(self, max_width: int) -> Iterator[list[int]]:
        widths = [max(map(cell_len, column)) + _GAP for column in zip(self._headers, *self._rows, strict=True)]
        part, width = [0], widths[0]
        for index in range(1, len(widths)):
            if len(part) > 1 and width + widths[index] > max_width:
                yield part
                part, width = [0], widths[0]
            part.append(index)
            width += widths[index]
        yield part

    def _table(self, columns: Sequence[int], title: str | None) -> Table:
        table = Table(title=title, title_justify="left", show_edge=False)
        for index in columns:
            table.add_column(self._headers[index], justify="left" if index < self._num_left else "right")
        for row in self._rows:
            table.add_row(*(row[index] for index in columns))
        return table
