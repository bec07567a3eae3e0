"""Request traces: arrivals, lengths, and the prefixes that prompts share.

A trace has no text. Prompts are lists of *block ids*, one for every `block_size` tokens and one for the rest at the
end: equal leading ids mean equal leading tokens. Formats:

- Mooncake (FAST '25), JSON lines: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (512-token
  blocks). `kvrelay trace synth` writes it too.
- Recordings of `kvrelay bench record`: the same, with the tokens per block id in `block_size` of every row.
- Azure LLM inference traces (Splitwise, ISCA '24), CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; prefixes
  are unknown, so prompts share none.
"""

import csv
import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from measure.workload.sessions import Segment

MOONCAKE_BLOCK_SIZE = 512
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(Exception):
    """A trace cannot be read or used; the message names file, line and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Arrival since the start of the trace."""
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]
    """One id per block of the prompt, a partial last one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_size: int
    """Tokens per block id."""
    requests: tuple[TraceRequest, ...]

    @property
    def duration_s(self) -> float:
        """Time from the start of the trace to its last arrival."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    def segments(self, request: TraceRequest) -> tuple[Segment, ...]:
        """Return a prompt as segments, whose contents are its block ids."""
        *full, last = request.block_ids
        rest = Segment(last, request.num_prompt_tokens - len(full) * self.block_size)
        return (*(Segment(block_id, self.block_size) for block_id in full), rest)

    def first(self, num_requests: int) -> "Trace":
        """Return the trace cut to its first requests."""
        return replace(self, requests=self.requests[:num_requests])

    def faster(self, speed: float) -> "Trace":
        """Return the trace with all gaps between arrivals divided by `speed`."""
        if not speed > 0:
            raise TraceError(f"speed must be positive, not {speed:g}")
        return replace(self, requests=tuple(replace(r, arrival_s=r.arrival_s / speed) for r in self.requests))

    def shrunk(self, factor: int) -> "Trace":
        """Return the trace with prompts, answers and blocks `factor` times shorter, for small machines.

        Shared blocks stay shared. Lengths are rounded down, to at least one token. Raises TraceError unless the factor
        divides the block size.
        """
        if factor < 1 or self.block_size % factor:
            raise TraceError(f"{self.name}: the factor {factor} does not divide its blocks of {self.block_size} tokens")
        block_size = self.block_size // factor

        def shrink(request: TraceRequest) -> TraceRequest:
            num_prompt_tokens = max(1, request.num_prompt_tokens // factor)
            return replace(
                request,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=max(1, request.num_output_tokens // factor),
                block_ids=request.block_ids[: -(-num_prompt_tokens // block_size)],
            )

        return replace(self, block_size=block_size, requests=tuple(shrink(r) for r in self.requests))


def read_trace(path: Path, *, block_size: int | None = None) -> Trace:
    """Read a trace: Mooncake or a recording when the name ends in `.jsonl`, Azure when it ends in `.csv`.

    The first request arrives at 0. `block_size` is the number of tokens per block id; None: as stated in the file, else
    512. An Azure trace gets blocks of that size. Raises TraceError, OSError.
    """
    readers: Mapping[str, Callable[[Path, int | None], _Rows]] = {".jsonl": _mooncake, ".csv": _azure}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TraceError(f"{path}: a trace's name ends in .jsonl (Mooncake, recordings) or .csv (Azure)")
    rows = list(reader(path, block_size))
    if not rows:
        raise TraceError(f"{path}: has no requests")
    _, block_size = rows[0]
    requests = sorted((request for request, _ in rows), key=lambda request: request.arrival_s)
    start_s = requests[0].arrival_s
    return Trace(
        name=path.stem,
        block_size=block_size,
        requests=tuple(replace(r, arrival_s=r.arrival_s - start_s) for r in requests),
    )


def trace_row(request: TraceRequest) -> dict[str, Any]:
    """Return a request in Mooncake's format; its arrival is rounded to milliseconds."""
    return {
        "timestamp": round(request.arrival_s * 1000),
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": request.block_ids,
    }


def write_trace(path: Path, requests: Iterable[TraceRequest], *, block_size: int = MOONCAKE_BLOCK_SIZE) -> None:
    """Write requests in Mooncake's format, with `block_size` in every row unless it is Mooncake's. Raises OSError."""
    extra = {} if block_size == MOONCAKE_BLOCK_SIZE else {"block_size": block_size}
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            file.write(json.dumps(trace_row(request) | extra, separators=(",", ":")) + "\n")


_Rows: TypeAlias = Iterator[tuple[TraceRequest, int]]
"""Requests, each with its tokens per block id."""


def _mooncake(path: Path, block_size: int | None) -> _Rows:
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            where = f"{path}:{line}"
            try:
                row = json.loads(text)
            except ValueError as error:
                raise TraceError(f"{where}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise TraceError(f"{where}: a row must be an object, not {type(row).__name__}")
            block_size = _block_size(row, block_size, where)
            yield _mooncake_request(row, block_size, where), block_size


def _block_size(row: dict[str, Any], known: int | None, where: str) -> int:
    """Return the tokens per block id, which must agree in all rows and with the caller."""
    if "block_size" not in row:
        return MOONCAKE_BLOCK_SIZE if known is None else known
    stated = _count(row["block_size"], "block_size", where)
    if known is not None and stated != known:
        raise TraceError(f"{where}: block_size: is {stated}, which contradicts {known} before it or from the caller")
    return stated


def _mooncake_request(row: dict[str, Any], block_size: int, where: str) -> TraceRequest:
    timestamp = row.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < float("inf"):
        raise TraceError(f"{where}: timestamp: must be milliseconds, not {_show(timestamp)}")
    num_prompt_tokens = _count(row.get("input_length"), "input_length", where)
    num_output_tokens = _count(row.get("output_length"), "output_length", where)
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block_id) is int and block_id >= 0 for block_id in ids):
        raise TraceError(f"{where}: hash_ids: must be a list of non-negative integers, not {_show(ids)}")
    num_blocks = -(-num_prompt_tokens // block_size)
    if len(ids) != num_blocks:
        raise TraceError(
            f"{where}: hash_ids: {len(ids)} ids, but {num_prompt_tokens} tokens are {num_blocks} blocks of {block_size}"
        )
    return TraceRequest(
        arrival_s=timestamp / 1000,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        block_ids=tuple(ids),
    )


def _azure(path: Path, block_size: int | None) -> _Rows:
    next_id = 0
    block_size = MOONCAKE_BLOCK_SIZE if block_size is None else block_size
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        missing = [name for name in _AZURE_FIELDS if name not in (rows.fieldnames or ())]
        if missing:
            raise TraceError(f"{path}:1: {missing[0]}: no such column; an Azure trace has {', '.join(_AZURE_FIELDS)}")
        for row in rows:
            where = f"{path}:{rows.line_num}"
            num_prompt_tokens = _count(_integer(row["ContextTokens"]), "ContextTokens", where)
            num_blocks = -(-num_prompt_tokens // block_size)
            request = TraceRequest(
                arrival_s=_seconds(row["TIMESTAMP"], where),
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=_count(_integer(row["GeneratedTokens"]), "GeneratedTokens", where),
                block_ids=tuple(range(next_id, next_id + num_blocks)),
            )
            yield request, block_size
            next_id += num_blocks


def _seconds(value: str, where: str) -> float:
    try:
        return datetime.datetime.fromisoformat(value).replace(tzinfo=datetime.UTC).timestamp()
    except (TypeError, ValueError):
        raise TraceError(f"{where}: TIMESTAMP: must be a date and time, not {_show(value)}") from None


def _integer(value: str | None) -> int | str | None:
    try:
        return int(value or "")
    except ValueError:
        return value


def _count(value: object, field: str, where: str) -> int:
    if type(value) is not int or value < 1:
        raise TraceError(f"{where}: {field}: must be a positive integer, not {_show(value)}")
    return value


def _show(value: object) -> str:
    return "missing" if value is None else repr(value)[:40]
