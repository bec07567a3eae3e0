"""`kvrelay logs`: the JSON lines of every process, readable."""

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep
from typing import Annotated, Any, TextIO

import typer

from cli.errors import CliError
from cli.options import DEFAULT_CONFIG, ConfigOption
from cli.target import run_dir_of
from common.log import old_log

_POLL_S = 0.2
_SUFFIX = ".log"
_HEAD_KEYS = ("ts", "level", "process", "logger", "msg", "exc")
_CLOCK = slice(11, 23)  # hours to milliseconds of an ISO time


def _names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the processes and pools with logs, for the shell to complete."""
    folder = run_dir_of(Path(ctx.params.get("config_path") or DEFAULT_CONFIG)) / "logs"
    processes = {path.stem for path in folder.glob(f"*{_SUFFIX}")}
    return sorted(each for each in processes | {_pool_of(each) for each in processes} if each.startswith(incomplete))


def logs(
    process: Annotated[
        str | None,
        typer.Argument(
            help="Such as router-0, decode (the whole pool), supervisor; default: all.", autocompletion=_names
        ),
    ] = None,
    config_path: ConfigOption = DEFAULT_CONFIG,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until Ctrl-C.")] = False,
    num_lines: Annotated[int, typer.Option("--lines", "-l", min=0, help="Last lines of each process.")] = 50,
    raw: Annotated[bool, typer.Option("--raw", help="Print the JSON lines unchanged.")] = False,
) -> None:
    """Show the logs of the cluster's processes, in order of time.

    The logs stay after `kvrelay down`, until the next `kvrelay up`.

    \b
    kvrelay logs
    kvrelay logs decode-0 --follow
    kvrelay logs --raw | grep req-0123456789abcdef
    """  # noqa: D301 - \b marks a preformatted block
    folder = run_dir_of(config_path) / "logs"
    paths = _log_files(folder, process)
    show = _raw_line if raw else _readable_line
    files = [LogFile(path) for path in paths]
    try:
        for process_name, line in _by_time(files, num_lines):
            typer.echo(show(process_name, line))
        if follow:
            _follow(files, show, wait=lambda: sleep(_POLL_S))
    except KeyboardInterrupt:
        return
    finally:
        for file in files:
            file.close()


class LogFile:
    """One process's log, read from its end on, and over its rotations."""

    def __init__(self, path: Path) -> None:
        self.process = path.stem
        self._path = path
        self._stream: TextIO = path.open(encoding="utf-8", errors="replace")
        self._partial = ""
        self._was_replaced = False

    def last_lines(self, num_lines: int) -> Sequence[str]:
        """Return the last complete lines that are there now."""
        lines = deque(self.new_lines(), maxlen=num_lines)
        if len(lines) < num_lines:  # it may have begun a moment ago
            before = _lines_of(old_log(self._path, 1))
            lines.extendleft(reversed(before[max(0, len(before) - (num_lines - len(lines))) :]))
        return lines

    def new_lines(self) -> list[str]:
        """Return the complete lines written since the last call."""
        *lines, self._partial = (self._partial + self._stream.read()).split("\n")
        if not self._is_replaced():
            self._was_replaced = False
        elif not self._was_replaced:
            self._was_replaced = True  # its process may still write a line to the old file: look once more
        else:
            self._stream.close()
            self._stream = self._path.open(encoding="utf-8", errors="replace")
            self._was_replaced = False
            *more, self._partial = (self._partial + self._stream.read()).split("\n")
            lines += more
        return lines

    def _is_replaced(self) -> bool:
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._stream.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _by_time(files: Sequence[LogFile], num_lines: int) -> list[tuple[str, str]]:
    """Return (process, line) of the last lines of all files, in the order of time.

    A line without a time stays behind its predecessor; where that is cut off, it comes first.
    """
    stamped: list[tuple[str, str, str]] = []
    for file in files:
        time = ""
        for line in file.last_lines(num_lines):
            time = _time_of(line) or time
            stamped.append((time, file.process, line))
    return [(process, line) for _, process, line in sorted(stamped, key=lambda each: each[0])]


def _follow(files: Sequence[LogFile], show: Callable[[str, str], str], *, wait: Callable[[], None]) -> None:
    while True:
        wait()
        for file in files:
            for line in file.new_lines():
                typer.echo(show(file.process, line))


def _log_files(folder: Path, process: str | None) -> list[Path]:
    found = sorted(folder.glob(f"*{_SUFFIX}"))
    if not found:
        raise CliError(f"there are no logs in {folder}: `kvrelay up` has not run with this configuration")
    if process is None:
        return found
    chosen = [path for path in found if process in (path.stem, _pool_of(path.stem))]
    if not chosen:
        raise CliError(f"there is no log of {process!r}; there are: {', '.join(path.stem for path in found)}")
    return chosen


def _pool_of(process: str) -> str:
    """Return the name without its number."""
    pool, _, number = process.rpartition("-")
    return pool if number.isdecimal() else process


def _entry_of(line: str) -> dict[str, Any] | None:
    """Return a line's JSON object; None for a line that a library wrote by itself."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "msg" in entry else None


def _time_of(line: str) -> str:
    """Return the line's ISO time, which sorts as text; empty when it has none."""
    entry = _entry_of(line)
    return str(entry.get("ts", "")) if entry is not None else ""


def _raw_line(process: str, line: str) -> str:
    return line


def _readable_line(process: str, line: str) -> str:
    """Return "time level process message key=value …"; a line that is not JSON stays as it is."""
    entry = _entry_of(line)
    if entry is None:
        return f"{process:<12} {line}"
    extra = "".join(f" {key}={value}" for key, value in entry.items() if key not in _HEAD_KEYS)
    head = f"{str(entry.get('ts', ''))[_CLOCK]} {entry.get('level', ''):<7} {process:<12} {entry['msg']}{extra}"
    return f"{head}\n{entry['exc']}" if entry.get("exc") else head
