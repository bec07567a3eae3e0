"""The terminal: answers go to stdout, everything about them to stderr, and text of a model is never interpreted."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from google.protobuf.message import Message

T = TypeVar("T")
_FILE_WIDTH = 220
out = Console(markup=False, highlight=False, emoji=False)
err = Console(markup=False, highlight=False, emoji=False, stderr=True)

# C0 and C1 controls but tab and newline: a model's text must not move the cursor or set the title of a terminal.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def write_text(text: str) -> None:
    """Write a piece of an answer to stdout and flush it; control characters are dropped on a terminal."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROLS)
    sys.stdout.write(text)
    sys.stdout.flush()


def print_wide(renderable: RenderableType, *, file: IO[str] | None = None) -> None:
    """Print a table to stdout or a file: as wide as a terminal, or as wide as it likes in a file or a pipe."""
    is_screen = file is None and out.is_terminal
    wide = Console(markup=False, highlight=False, emoji=False, width=_FILE_WIDTH, file=file)
    (out if is_screen else wide).print(renderable)


def show(
    ask: Callable[[], T],
    *,
    view: Callable[[T], RenderableType],
    record: Callable[[T], object],
    watch: bool,
    interval_s: float,
    as_json: bool,
) -> None:
    """Print what `ask` returns: as a view, as the JSON of its record, or as a view that stays until Ctrl-C."""
    if watch:
        watch_view(lambda: view(ask()), interval_s)
    elif as_json:
        typer.echo(json.dumps(record(ask()), indent=2))
    else:
        print_wide(view(ask()))


def message_record(message: "Message") -> dict[str, object]:
    """Return every field of a message, those with default values too."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def watch_view(view: Callable[[], RenderableType], interval_s: float) -> None:
    """Keep a view on the screen until Ctrl-C; a failure to make it after the first time is shown in its place."""
    from common.errors import KvrelayError  # gRPC, which not every command needs

    try:
        with Live(view(), console=out, auto_refresh=False) as live:
            while True:
                sleep(interval_s)
                try:
                    latest = view()
                except KvrelayError as error:  # a router that restarts comes back into view
                    latest = Text(f"{error.message}\nstill trying; Ctrl-C ends")
                live.update(latest, refresh=True)
    except KeyboardInterrupt:
        return


class Progress:
    """Tells what is going on: one line per report with the time since the start, and a spinner on a terminal.

    Call it with a line, from any thread, inside its `with` block.
    """

    def __init__(self, console: Console = err) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._status = console.status("starting")

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._started_s

    def __call__(self, line: str) -> None:
        """Report `line`."""
        self._console.print(f"{self.elapsed_s:6.1f} s  {line}", soft_wrap=True)
        self._status.update(line)

    def update(self, line: str) -> None:
        """Show `line` beside the spinner, without a report."""
        self._status.update(line)

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()


@contextmanager
def repeating(report: Callable[[], None], *, every_s: float) -> Iterator[None]:
    """Call `report` from a thread at intervals until the block ends."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s):
            report()

    reporter = threading.Thread(target=run)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
