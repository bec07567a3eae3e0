"""Reads recorded sessions, in three formats.

- Packed sessions, JSON lines, `.jsonl` or `.jsonl.gz`: `requests` of a session with `t` (s), `in`, `out` (tokens),
  `api_s`, `think_s`, `agent`; `like: [j, k]` are the first `k` blocks of request `j`, `new` the ids that follow.
- kv-cache-tester, a `.json` file per session, or a folder of them: `requests` with `hash_ids`, `api_time` and
  `think_time`; entries of the type `subagent` hold the requests of one.
- Spans of OpenTelemetry, a `.json` file per session, or a folder of them (`measure.workload.span_traces`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field, NonNegativeInt

from measure.workload.session_traces import (
    BLOCK_SIZE,
    MAX_REQUESTS,
    PrefixTree,
    RecordedRequest,
    RecordedSession,
    session_of,
)
from measure.workload.sessions import Beginning
from measure.workload.span_traces import requests_of
from measure.workload.traces import MAX_SECONDS, MAX_TOKENS, Tokens, TraceError, checked, reading

_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
_TokensOrNone = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class _Request(BaseModel):
    t: _Seconds
    num_in: Tokens = Field(alias="in")
    out: _TokensOrNone
    stop: str = ""
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
    block_size: Tokens = BLOCK_SIZE
    tool_tokens: _TokensOrNone | None = None
    system_tokens: _TokensOrNone | None = None
    requests: list[Annotated[_Hashed | _SubAgent, Field(discriminator="type")]] = Field(
        min_length=1, max_length=MAX_REQUESTS
    )


class _PackedSession(BaseModel):
    session: str = ""
    tool_tokens: _TokensOrNone | None = None
    system_tokens: _TokensOrNone | None = None
    requests: list[_Packed] = Field(min_length=1, max_length=MAX_REQUESTS)


class _Kind(BaseModel):
    """What tells the formats of `.json` files apart."""

    requests: Any = None
    spans: Any = None
    resources: Any = Field(None, alias="resourceSpans")


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
    """Yield the sessions of a file or folder, in its order. Raises TraceError, also without any, and OSError."""
    is_packed = path.suffix.lower() in (".jsonl", ".gz") and not path.is_dir()
    num_found = 0
    for session in _packed(path) if is_packed else map(_session_in, files_of(path)):
        num_found += 1
        yield session
    if not num_found:
        raise TraceError(f"{path}: has no {'.json files' if path.is_dir() else 'sessions'}")


def _session_in(path: Path) -> RecordedSession:
    with reading(path) as file:
        text = file.read()
    kind = checked(_Kind, text, str(path))
    if kind.requests is None:
        if kind.spans is None and kind.resources is None:
            raise TraceError(f"{path}: has neither requests of kv-cache-tester nor spans of OpenTelemetry")
        return session_of(path.stem, requests_of(text, str(path)), tools=None, system=None)
    read = checked(_HashedSession, text, str(path))
    requests = _flat(read)
    if not 0 < len(requests) <= MAX_REQUESTS:
        what = f"has {len(requests):,} with those of sub-agents; no more than {MAX_REQUESTS:,} can be played"
        raise TraceError(f"{path}: requests: {what if requests else 'has none of its own'}")
    found = _with_prefixes(requests, read.block_size)
    return session_of(read.id or path.stem, found, tools=read.tool_tokens, system=read.system_tokens)


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
    with reading(path) as file:
        for line, text in enumerate(file, start=1):
            if text.strip():
                yield _packed_session(text, f"{path}:{line}")


def _packed_session(text: str, where: str) -> RecordedSession:
    read = checked(_PackedSession, text, where)
    requests = []
    for index, each in enumerate(read.requests):
        j, k = each.like
        if k and j >= index:
            raise TraceError(f"{where}: requests.{index}.like: request {j} is not an earlier one")
        if k and (k - 1) * BLOCK_SIZE >= min(read.requests[j].num_in, each.num_in):
            raise TraceError(f"{where}: requests.{index}.like: request {j}, or this one, has fewer than {k} blocks")
        requests.append(_recorded(each, Beginning(j, k * BLOCK_SIZE)))
    return session_of(read.session or where, requests, tools=read.tool_tokens, system=read.system_tokens)


def _recorded(each: _Request, kept: Beginning) -> RecordedRequest:
    return RecordedRequest(
        at_s=each.t,
        end_s=each.t + (each.api_s or 0.0),
        num_prompt_tokens=each.num_in,
        num_output_tokens=max(1, each.out),
        calls_tool=each.stop == "tool_use",
        agent=each.agent,
        kept=kept,
        pause_s=each.think_s,
    )
