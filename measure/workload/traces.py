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
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from measure.workload.sessions import Segment

if TYPE_CHECKING:
    from kvrelay.client.traffic import RecordedRequest

MOONCAKE_BLOCK_SIZE = 512
MAX_TOKENS = 1 << 24
"""Longest prompt, answer or block of a trace: more is an error of a file."""
MAX_SECONDS = 1e10
"""Latest time of a trace; beyond the present in seconds since 1970."""


Tokens: TypeAlias = Annotated[int, Field(gt=0, le=MAX_TOKENS)]


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

    def without_first(self, num_requests: int) -> "Trace":
        """Return the requests after so many, the first of them at 0. Raises TraceError when none is left."""
        if num_requests >= len(self.requests):
            raise TraceError(f"{self.name}: has {len(self.requests)} requests; {num_requests} are to be skipped")
        rest = self.requests[num_requests:]
        return replace(self, requests=tuple(replace(r, arrival_s=r.arrival_s - rest[0].arrival_s) for r in rest))

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


def _row(request: TraceRequest) -> dict[str, Any]:
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
            file.write(json.dumps(_row(request) | extra, separators=(",", ":")) + "\n")


class TrafficTrace:
    """Collects recorded requests and writes them in order of their arrivals."""

    def __init__(self) -> None:
        self._requests: list[RecordedRequest] = []

    @property
    def num_requests(self) -> int:
        """Requests so far."""
        return len(self._requests)

    def add(self, request: "RecordedRequest") -> None:
        """Add a request. Raises TraceError when its block size differs, as after a change of workers."""
        if self._requests and request.block_size != self._requests[0].block_size:
            raise TraceError(
                f"blocks of {request.block_size} tokens after blocks of {self._requests[0].block_size}:"
                " the recording ends where the cluster's block size changed"
            )
        self._requests.append(request)

    def write(self, path: Path) -> None:
        """Write the requests, with block keys as small numbers in order of first appearance. Raises OSError.

        An answer without tokens is written as one token long, the least that the format allows; `outcome` says why.
        """
        ids: dict[int, int] = {}
        with path.open("w", encoding="utf-8") as file:
            for request in sorted(self._requests, key=lambda request: request.arrival_s):
                row = _row(
                    TraceRequest(
                        arrival_s=request.arrival_s,
                        num_prompt_tokens=request.num_prompt_tokens,
                        num_output_tokens=max(1, round(request.num_output_tokens)),
                        block_ids=tuple(ids.setdefault(key, len(ids)) for key in request.block_keys),
                    )
                )
                row |= {"block_size": request.block_size, "outcome": request.outcome}
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


_Rows: TypeAlias = Iterator[tuple[TraceRequest, int]]
"""Requests, each with its tokens per block id."""


class _MooncakeRow(BaseModel):
    model_config = ConfigDict(strict=True)

    timestamp: Annotated[float, Field(ge=0, le=1000 * MAX_SECONDS, allow_inf_nan=False)]
    """Milliseconds."""
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[NonNegativeInt]
    block_size: Tokens | None = None


class _AzureRow(BaseModel):
    TIMESTAMP: datetime.datetime
    ContextTokens: Tokens
    GeneratedTokens: Tokens


_Row = TypeVar("_Row", bound=BaseModel)


def checked(kind: type[_Row], raw: object, where: str) -> _Row:
    """Return the model of a value, or of a JSON text. Raises TraceError."""
    try:
        return kind.model_validate_json(raw) if isinstance(raw, str) else kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
    if first["type"] == "json_invalid":
        raise TraceError(f"{where}: not JSON: {first['ctx']['error'].replace(' line 1 column', ' column')}")
    field = ".".join(map(str, first["loc"])) + ": " if first["loc"] else ""
    found = first["input"]
    value = f", not {str(found)[:40]!r}" if isinstance(found, str | int | float) else ""
    raise TraceError(f"{where}: {field}{first['msg'].removeprefix('Value error, ')}{value}")


@contextmanager
def reading(path: Path) -> Iterator[IO[str]]:
    """Open a text, compressed if its name ends in `.gz`. Raises TraceError for faults of it in the block, OSError."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix.lower() == ".gz"
            else path.open(encoding="utf-8-sig", newline="")
        ) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        advice = "copy it again, or leave .gz out of its name if it is not compressed"
        raise TraceError(f"{path}: cannot be unpacked: {error}; {advice}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not text in UTF-8: {error}") from None


def _mooncake(path: Path, block_size: int | None) -> _Rows:
    with reading(path) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            where = f"{path}:{line}"
            row = checked(_MooncakeRow, text, where)
            block_size = _block_size(row.block_size, block_size, where)
            num_blocks = -(-row.input_length // block_size)
            if len(row.hash_ids) != num_blocks:
                raise TraceError(
                    f"{where}: hash_ids: {len(row.hash_ids)} ids, but {row.input_length} tokens are {num_blocks} blocks"
                    f" of {block_size}"
                )
            request = TraceRequest(
                arrival_s=row.timestamp / 1000,
                num_prompt_tokens=row.input_length,
                num_output_tokens=row.output_length,
                block_ids=tuple(row.hash_ids),
            )
            yield request, block_size


def _block_size(stated: int | None, known: int | None, where: str) -> int:
    """Return the tokens per block id, which must agree in all rows and with the caller."""
    if stated is not None and known is not None and stated != known:
        raise TraceError(f"{where}: block_size: is {stated}, which contradicts {known} before it or from the caller")
    return stated or known or MOONCAKE_BLOCK_SIZE


def _azure(path: Path, block_size: int | None) -> _Rows:
    next_id = 0
    block_size = block_size or MOONCAKE_BLOCK_SIZE
    with reading(path) as file:
        rows = csv.DictReader(file)
        missing = [name for name in _AzureRow.model_fields if name not in (rows.fieldnames or ())]
        if missing:
            columns = ", ".join(_AzureRow.model_fields)
            raise TraceError(f"{path}:1: {missing[0]}: no such column; an Azure trace has {columns}")
        for raw in rows:
            row = checked(_AzureRow, raw, f"{path}:{rows.line_num}")
            num_blocks = -(-row.ContextTokens // block_size)
            request = TraceRequest(
                arrival_s=row.TIMESTAMP.replace(tzinfo=datetime.UTC).timestamp(),
                num_prompt_tokens=row.ContextTokens,
                num_output_tokens=row.GeneratedTokens,
                block_ids=tuple(range(next_id, next_id + num_blocks)),
            )
            yield request, block_size
            next_id += num_blocks
