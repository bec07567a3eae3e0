"""Results on disk that a command continues after a stop, and the processes that make them."""

import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from measure.load.records import RequestRecord

_R = TypeVar("_R")
_RECORD = TypeAdapter(RequestRecord)


class OtherSettings(Exception):
    """A folder holds results of other settings; the message names them and what to do."""


class ResultFolder:
    """A folder of results: settings.json, and a folder for each part."""

    def __init__(self, out: Path, *parts: str) -> None:
        self.out = out
        self._parts = parts

    def claim(self, ours: Mapping[str, Any]) -> None:
        """Keep settings; new keys are added to those of earlier results. Raises OtherSettings where values differ."""
        path = self.out / "settings.json"
        ours = json.loads(json.dumps(ours))
        theirs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        changed = sorted(key for key in ours if key in theirs and ours[key] != theirs[key])
        if changed:
            raise OtherSettings(
                f"{self.out} holds results of other settings ({', '.join(changed)} differ);"
                " name another folder with --out, or replace them with --again"
            )
        write_json(path, {**theirs, **ours})

    def forget(self) -> None:
        """Remove earlier results from the folder, and nothing else."""
        for part in self._parts:
            shutil.rmtree(self.out / part, ignore_errors=True)
        (self.out / "settings.json").unlink(missing_ok=True)


def write_requests(path: Path, requests: Iterable[RequestRecord]) -> None:
    """Write a line of JSON for each request, with the first and the last piece of its answer only."""
    with path.open("wb") as file:
        for request in requests:
            num_tokens = request.num_output_tokens
            if num_tokens > 2:
                ends = request.chunk_s[0], request.chunk_s[-1]
                request = replace(request, chunk_s=ends, chunk_tokens=(1, num_tokens - 1))
            file.write(_RECORD.dump_json(request, exclude_defaults=True) + b"\n")


def read_requests(path: Path) -> Iterator[RequestRecord]:
    """Yield the requests of a file. Raises OSError, ValueError."""
    with path.open("rb") as file:
        yield from map(_RECORD.validate_json, file)


def write_json(path: Path, value: object) -> None:
    """Write a file atomically: readers find all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def in_processes(
    run: Callable[..., _R],
    tasks: Sequence[tuple[Any, ...]],
    *,
    num_jobs: int,
    prepare: Callable[[], object] | None = None,
) -> Iterator[_R]:
    """Yield the results of `run` for each tuple of arguments, each from a process of its own, as they end.

    Each process first calls `prepare`. The first error, which is raised, or an interrupt ends all processes at once.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, context, initializer=prepare, max_tasks_per_child=1) as pool:
        futures = [pool.submit(run, *arguments) for arguments in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # an interrupt, too: running tasks may take minutes
            for future in futures:
                future.cancel()
            for process in multiprocessing.active_children():
                process.terminate()
            raise
