"""Files of results, and the processes that make them."""

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from measure.load.records import RequestRecord

_R = TypeVar("_R")
_RECORD = TypeAdapter(RequestRecord)


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
