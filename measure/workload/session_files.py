"""Reads recorded sessions, in three formats.

- Packed sessions, JSON lines, `.jsonl` or `.jsonl.gz`: `requests` of a session with `t` (s), `in`, `out` (tokens),
  `api_s`, `think_s`, `agent`; `like: [j, k]` are the first `k` blocks of request `j`, `new` the ids that follow.
- kv-cache-tester, a `.json` file per session, or a folder of them: `requests` with `hash_ids`, `api_time` and
  `think_time`; entries of the type `subagent` hold the requests of one.
- Spans of OpenTelemetry, a `.json` file per session, or a folder of them (`measure.workload.span_traces`).
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from measure.workload.session_traces import BLOCK_SIZE, PrefixTree, RecordedRequest, RecordedSession, session_of
from measure.workload.sessions import Beginning
from measure.workload.span_traces import requests_of
from measure.workload.traces import TraceError

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Request(BaseModel):
    t: _Seconds
    num_in: PositiveInt = Field(alias="in")
    out: NonNegativeInt
    api_s: _Seconds | None = Field(default=None, validation_alias=AliasChoices("api_s", "api_time"))
    think_s: _Seconds | None = Field(default=None, validation_alias=AliasChoices("think_s", "think_time"))
    agent: str = ""


class _Packed(_Request):
    like: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)


class _Hashed(_Request):
    type: Literal["s", "n"]
    hash_ids: list[int] = []


class _SubAgent(BaseModel):
    t: _Seconds
    type: Literal["subagent"]
    agent_id: str
    requests: list[_Hashed] = []


class _HashedSession(BaseModel):
    id: str = ""
    block_size: PositiveInt = BLOCK_SIZE
    tool_tokens: NonNegativeInt | None = None
    system_tokens: NonNegativeInt | None = None
    requests: list[Annotated[_Hashed | _SubAgent, Field(discriminator="type")]] = Field(min_length=1)


class _PackedSession(BaseModel):
    session: str = ""
    tool_tokens: NonNegativeInt | None = None
    system_tokens: NonNegativeInt | None = None
    requests: list[_Packed] = Field(min_length=1)


def is_session_trace(path: Path) -> bool:
    """Return whether a path holds recorded sessions, by its name or the keys of its first line. Raises OSError."""
    if path.is_dir() or path.suffix.lower() in (".gz", ".json"):
        return True
    if path.suffix.lower() != ".jsonl" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return '"requests"' in file.readline()


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a trace of sessions, in order: itself, or those of a folder."""
    return tuple(sorted(path.glob("*.json"))) if path.is_dir() else (path,)


def read_sessions(path: Path) -> Iterator[RecordedSession]:
    """Yield the sessions of a file or folder, in its order. Raises TraceError, OSError."""
    if path.suffix.lower() in (".jsonl", ".gz"):
        yield from _packed(path)
        return
    files = files_of(path)
    if not files:
        raise TraceError(f"{path}: has no .json files")
    for file in files:
        yield _session_in(file)


def _session_in(path: Path) -> RecordedSession:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        document = json.loads(text)
    except ValueError as error:
        raise TraceError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or not {"requests", "spans", "resourceSpans"} & document.keys():
        raise TraceError(f"{path}: has neither requests of kv-cache-tester nor spans of OpenTelemetry")
    if "requests" not in document:
        try:
            calls = requests_of(document, str(path))
        except (AttributeError, TypeError) as error:
            raise TraceError(f"{path}: spans: {error}") from None
        return session_of(path.stem, calls, tools=None, system=None)
    read = checked(_HashedSession, text, str(path))
    requests = _flat(read)
    if not requests:
        raise TraceError(f"{path}: requests: has none of its own")
    return session_of(
        read.id or path.stem,
        _with_prefixes(requests, read.block_size),
        tools=read.tool_tokens,
        system=read.system_tokens,
    )


def _flat(read: _HashedSession) -> list[_Hashed]:
    """Return all requests, those of a sub-agent in the place of its entry and with the session's times."""
    found: list[_Hashed] = []
    for entry in read.requests:
        if isinstance(entry, _Hashed):
            found.append(entry)
            continue
        begin_s = entry.t if entry.requests and entry.requests[0].t < entry.t else 0.0
        found += [each.model_copy(update={"t": begin_s + each.t, "agent": entry.agent_id}) for each in entry.requests]
    return found


def _with_prefixes(requests: Sequence[_Hashed], block_size: int) -> list[RecordedRequest]:
    """Return the requests, each with the latest earlier one that shares most of its leading blocks."""
    tree = PrefixTree()
    found = []
    for request in requests:
        turn, num_blocks = tree.add(request.hash_ids)
        found.append(_recorded(request, Beginning(turn, num_blocks * block_size)))
    return found


def _packed(path: Path) -> Iterator[RecordedSession]:
    is_compressed = path.suffix.lower() == ".gz"
    with gzip.open(path, "rt", encoding="utf-8") if is_compressed else path.open(encoding="utf-8") as file:
        try:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield _packed_session(text, f"{path}:{line}")
        except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: cannot be read: {error}") from None


def _packed_session(text: str, where: str) -> RecordedSession:
    read = checked(_PackedSession, text, where)
    requests = []
    for index, each in enumerate(read.requests):
        j, k = each.like
        if k and j >= index:
            raise TraceError(f"{where}: requests.{index}.like: request {j} is not an earlier one")
        requests.append(_recorded(each, Beginning(j, k * BLOCK_SIZE)))
    return session_of(read.session or where, requests, tools=read.tool_tokens, system=read.system_tokens)


def _recorded(each: _Request, kept: Beginning) -> RecordedRequest:
    return RecordedRequest(
        at_s=each.t,
        end_s=each.t + (each.api_s or 0.0),
        num_prompt_tokens=each.num_in,
        num_output_tokens=max(1, each.out),
        agent=each.agent,
        kept=kept,
        pause_s=each.think_s,
    )


def checked(kind: type[Any], text: str, where: str) -> Any:
    """Return a model's value of a JSON text. Raises TraceError."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise TraceError(f"{where}: {'.'.join(map(str, first['loc'])) or 'session'}: {first['msg']}") from None
