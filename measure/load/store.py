"""A load test's results on disk; see `measure.load.records` for the files.

Compact JSON. Times are rounded to microseconds. Fields with their default value are left out, and so is a request's
index, which follows from the order of due times. `run.json` is written last: a folder without it holds an unfinished
run.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from measure.load.records import PoolSample, RequestRecord, Run, RunInfo
from measure.load.spec import LoadSpec
from measure.load.targets.interface import TargetInfo

RUN_FILE, REQUESTS_FILE, SAMPLES_FILE = "run.json", "requests.jsonl", "samples.jsonl"

_R = TypeVar("_R")
_US = 6
"""Decimals kept of a second."""


class StoreError(Exception):
    """Results cannot be read or written; the message names file, line and field."""


class RunWriter:
    """An `Observer` that writes results during the run. Raises StoreError for a folder that already holds results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._requests: TextIO
        self._made = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any((folder / name).exists() for name in (RUN_FILE, REQUESTS_FILE)):
                raise StoreError(f"{folder}: holds the results of another run")
            self._requests = (folder / REQUESTS_FILE).open("x", encoding="utf-8")
            self._samples = (folder / SAMPLES_FILE).open("w", encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{folder}: {error.strerror}") from error

    def started(self, spec: LoadSpec, target: TargetInfo) -> None:
        """Do nothing: `finish` writes the description of the run."""

    def record(self, request: RequestRecord) -> None:
        """Append a request."""
        self._requests.write(_line(request))

    def sample(self, sample: PoolSample) -> None:
        """Append a sample."""
        self._samples.write(_line(sample))

    def finish(self, info: RunInfo) -> None:
        """Close the run: everything is on disk when this returns. Atomic."""
        self.close()
        temporary = self._folder / f"{RUN_FILE}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(_plain(info), file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._folder / RUN_FILE)

    def close(self) -> None:
        """Close the files. Repeating it is harmless."""
        self._requests.close()
        self._samples.close()

    def discard_if_empty(self) -> None:
        """Close the files, and remove them if no request has ended."""
        self.close()
        if (self._folder / REQUESTS_FILE).stat().st_size:
            return
        for name in (REQUESTS_FILE, SAMPLES_FILE):
            (self._folder / name).unlink()
        with contextlib.suppress(OSError):  # a folder holds other files
            for folder in self._made or [self._folder]:
                folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def read_run(folder: Path) -> Run:
    """Read a finished run; requests in the order in which they were due. Raises StoreError."""
    if not (folder / RUN_FILE).exists() and (folder / REQUESTS_FILE).exists():
        raise StoreError(f"{folder}: has no {RUN_FILE}: the run was not finished")
    requests = _read_lines(folder / REQUESTS_FILE, RequestRecord)
    return Run(
        info=_parse(_text(folder / RUN_FILE), RunInfo, where=str(folder / RUN_FILE)),
        requests=in_due_order(requests),
        samples=tuple(_read_lines(folder / SAMPLES_FILE, PoolSample)) if (folder / SAMPLES_FILE).exists() else (),
    )


def in_due_order(requests: Iterator[RequestRecord] | list[RequestRecord]) -> tuple[RequestRecord, ...]:
    """Return the requests in order of their due times, numbered."""
    ordered = sorted(requests, key=lambda request: (request.due_s, request.session, request.turn))
    return tuple(replace(request, index=index) for index, request in enumerate(ordered))


def _read_lines(path: Path, kind: type[_R]) -> Iterator[_R]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        yield _parse(line, kind, where=f"{path}:{number}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StoreError(f"{path}: is not UTF-8 text: {error.reason}") from error


def _parse(text: str, kind: type[_R], *, where: str) -> _R:
    try:
        value: _R = _ADAPTERS[kind].validate_python(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        raise StoreError(f"{where}: {'.'.join(map(str, first['loc'])) or kind.__name__}: {first['msg']}") from error
    except ValueError as error:
        raise StoreError(f"{where}: is not JSON: {error}") from error
    return value


_ADAPTERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (RunInfo, RequestRecord, PoolSample)}


def _line(record: RequestRecord | PoolSample) -> str:
    return json.dumps(_plain(record), ensure_ascii=False, separators=(",", ":")) + "\n"


def _plain(record: RunInfo | RequestRecord | PoolSample) -> Any:
    """Return dictionaries, lists, rounded numbers and strings; fields with their default value are left out."""
    return _rounded(_ADAPTERS[type(record)].dump_python(record, exclude_defaults=True, exclude={"index"}))


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, _US)
        case dict():
            return {key: _rounded(held) for key, held in value.items()}
        case tuple() | list():
            return [_rounded(held) for held in value]
    return value
