"""Request traces: who asked when, for how much, and which prompts begin alike.

A trace says nothing about text. Prompts are lists of *block ids*, one for every `block_size` tokens and one for what
is left at the end: equal leading ids mean equal leading tokens. Formats read here:

- Mooncake (FAST '25), JSON lines: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (512-token
  blocks). `kvrelay trace synth` writes it too.
- Azure LLM inference traces (Splitwise, ISCA '24), CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; nothing is
  known about prefixes, so no two prompts share any.
"""

import csv
import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOONCAKE_BLOCK_SIZE = 512
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(Exception):
    """A trace cannot be read or used; the message names file, line and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Since the trace began."""
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]
    """As many as the prompt has blocks, the partly filled last one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_size: int
    """Tokens that one block id stands for."""
    requests: tuple[TraceRequest, ...]

    @property
    def duration_s(self) -> float:
        """From the trace's beginning to its last arrival."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    def first(self, num_requests: int) -> "Trace":
        """Return the trace cut behind its first requests."""
        return replace(self, requests=self.requests[:num_requests])

    def faster(self, speed: float) -> "Trace":
        """Return the trace with all gaps between arrivals divided by `speed`."""
        if not speed > 0:
            raise TraceError(f"speed must be positive, not {speed:g}")
        return replace(self, requests=tuple(replace(r, arrival_s=r.arrival_s / speed) for r in self.requests))

    def shrunk(self, factor: int) -> "Trace":
        """Return the trace with prompts, answers and blocks `factor` times shorter, for small machines.

        Blocks that were shared still are. Lengths are rounded down, to one token at least. Raises TraceError unless
        the factor divides the block size.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWriter:
    """Turns block ids into tokens.

    Every block repeats a pair of tokens that spells its id, so different ids differ in every pair of tokens, and equal
    leading ids give equal leading blocks at any even block size that divides the trace's.
    """

    block_size: int
    """Of the trace."""
    first_token: int = 0
    """Lowest token used: above the tokens that mean something special."""
    num_tokens: int = 1 << 20
    """How many different tokens are used. Ids below its square can be spelled."""

    def write(self, request: TraceRequest) -> NDArray[np.uint32]:
        """Return the prompt's tokens, [num_prompt_tokens]. Raises TraceError for an id that is too large."""
        ids = np.array(request.block_ids, dtype=np.int64)
        if ids.max() >= self.num_tokens**2:
            raise TraceError(f"block id {ids.max()} needs more than {self.num_tokens} different tokens")
        pairs = np.stack([ids % self.num_tokens, ids // self.num_tokens], axis=1) + self.first_token
        num_pairs = -(-self.block_size // 2)
        rows = np.broadcast_to(pairs.astype(np.uint32)[:, None, :], (len(ids), num_pairs, 2))
        blocks = rows.reshape(len(ids), 2 * num_pairs)[:, : self.block_size]
        return np.ascontiguousarray(blocks.reshape(-1)[: request.num_prompt_tokens])


def read_trace(path: Path, *, block_size: int = MOONCAKE_BLOCK_SIZE) -> Trace:
    """Read a trace: Mooncake when the name ends in `.jsonl`, Azure when it ends in `.csv`.

    The first request arrives at 0. `block_size` is what one of the file's ids stands for; an Azure trace gets blocks
    of that size. Raises TraceError, OSError.
    """
    readers: Mapping[str, Callable[[Path, int], Iterator[TraceRequest]]] = {".jsonl": _mooncake, ".csv": _azure}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TraceError(f"{path}: a trace's name ends in .jsonl (Mooncake) or .csv (Azure)")
    requests = sorted(reader(path, block_size), key=lambda request: request.arrival_s)
    if not requests:
        raise TraceError(f"{path}: holds no requests")
    start_s = requests[0].arrival_s
    return Trace(
        name=path.stem,
        block_size=block_size,
        requests=tuple(replace(r, arrival_s=r.arrival_s - start_s) for r in requests),
    )


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write requests in Mooncake's format; arrivals are rounded to milliseconds. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            row = {
                "timestamp": round(request.arrival_s * 1000),
                "input_length": request.num_prompt_tokens,
                "output_length": request.num_output_tokens,
                "hash_ids": request.block_ids,
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def _mooncake(path: Path, block_size: int) -> Iterator[TraceRequest]:
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
            yield _mooncake_request(row, block_size, where)


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


def _azure(path: Path, block_size: int) -> Iterator[TraceRequest]:
    next_id = 0
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        missing = [name for name in _AZURE_FIELDS if name not in (rows.fieldnames or ())]
        if missing:
            raise TraceError(f"{path}:1: {missing[0]}: no such column; an Azure trace has {', '.join(_AZURE_FIELDS)}")
        for row in rows:
            where = f"{path}:{rows.line_num}"
            num_prompt_tokens = _count(_integer(row["ContextTokens"]), "ContextTokens", where)
            num_blocks = -(-num_prompt_tokens // block_size)
            yield TraceRequest(
                arrival_s=_seconds(row["TIMESTAMP"], where),
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=_count(_integer(row["GeneratedTokens"]), "GeneratedTokens", where),
                block_ids=tuple(range(next_id, next_id + num_blocks)),
            )
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
