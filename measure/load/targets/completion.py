"""Reads a streamed completion: its events, and their text, tokens and report.

An event brings as many tokens as it has token ids, or one if it has text. An event with neither may be a token, such as
half a character, or none, such as what keeps a connection alive until the first token: the total in `usage` tells at
the end, and also corrects the count where a server puts several tokens into an event (`sending.settled`).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from common.errors import DeadlineExceeded, EngineFault, InvalidRequest, KvrelayError, Overloaded, Unauthenticated
from measure.load.records import ServerReport
from measure.load.targets.interface import TargetAnswer

_KINDS: Mapping[int, type[KvrelayError]] = {
    401: Unauthenticated,
    408: DeadlineExceeded,
    429: Overloaded,
    503: Overloaded,
    504: DeadlineExceeded,
}
_LONGEST = 300
DONE = b"[DONE]"


def error_of(status: int, body: bytes) -> KvrelayError:
    """Return the error of a response with a status other than 2xx."""
    kind = _KINDS.get(status, InvalidRequest if 400 <= status < 500 else EngineFault)
    return kind(f"HTTP {status}: {_message(body)}")


def error_in_stream(error: Any) -> KvrelayError:
    """Return the error that a server sends within an answer, after its status."""
    code = error.get("code") if isinstance(error, Mapping) else None
    kind = _KINDS.get(code, EngineFault) if isinstance(code, int) else EngineFault
    return kind(str(error.get("message", error) if isinstance(error, Mapping) else error)[:_LONGEST])


def _message(body: bytes) -> str:
    """Return the message of a body in the form of OpenAI or of other servers."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:_LONGEST]
    inner = parsed.get("error", parsed) if isinstance(parsed, Mapping) else parsed
    if isinstance(inner, Mapping):
        inner = inner.get("message") or inner.get("detail") or inner
    return str(inner)[:_LONGEST]


class SseReader:
    """Cuts a stream of bytes into the data of server-sent events (WHATWG HTML, 9.2).

    Lines end with LF or CRLF; other fields are skipped.

    A line may have any length: an event that repeats the token ids of a long prompt has hundreds of kilobytes.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of each event that `received` completes; several `data` lines are joined by LF."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()


class AnswerReader(Protocol):
    """Collects one streamed answer."""

    def take(self, data: bytes, /) -> int | None:
        """Take the data of an event; return its number of tokens, None: it has no part. Raises KvrelayError."""

    def build(self) -> TargetAnswer:
        """Return the answer. Raises EngineFault when its end is missing."""


class CompletionReader:
    """Collects one answer."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] | None = None
        self._usage: Mapping[str, Any] = {}
        self._report: Mapping[str, Any] = {}
        self._id: str | None = None
        self._is_over = False

    def take(self, data: bytes) -> int | None:
        """Take the data of an event; return its number of tokens, 0 if only the total can tell; None: it has no part.

        Raises KvrelayError.
        """
        if data == DONE:
            self._is_over = True
            return None
        try:
            event = json.loads(data)
        except ValueError:
            raise EngineFault(f"an event is not JSON: {data[:80]!r}") from None
        if not isinstance(event, dict):
            raise EngineFault(f"an event is not an object: {data[:80]!r}")
        if event.get("error"):
            raise error_in_stream(event["error"])
        self._id = self._id or event.get("id")
        self._report = event.get("kvrelay") or self._report
        self._usage = event.get("usage") or self._usage
        counts = [self._tokens_of(choice) for choice in event.get("choices") or ()]
        return sum(filter(None, counts)) if any(count is not None for count in counts) else None

    def build(self) -> TargetAnswer:
        """Return the answer. Raises EngineFault when its end is missing."""
        if not self._is_over:
            raise EngineFault("the server ended the stream before the answer was complete")
        usage = self._usage
        return TargetAnswer(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids) if self._token_ids is not None else None,
            num_prompt_tokens=usage.get("prompt_tokens"),
            num_output_tokens=usage.get("completion_tokens"),
            report=self._server_report(),
        )

    def _tokens_of(self, choice: Mapping[str, Any]) -> int | None:
        delta = choice.get("delta")
        said = choice.get("text") if delta is None else _said(delta)
        if said:
            self._texts.append(said)
        ids = choice.get("token_ids")
        if choice.get("finish_reason"):
            self._is_over = True
        if ids is not None:
            self._token_ids = (self._token_ids or []) + ids
            return len(ids)
        if said:
            return 1
        return None if delta is not None and "role" in delta else 0

    def _server_report(self) -> ServerReport:
        details = self._usage.get("prompt_tokens_details") or {}
        report = (self._report.get("requests") or [None])[0]
        if report is None:
            return ServerReport(request_id=self._id, num_cached_tokens=details.get("cached_tokens"))
        return ServerReport.of(report)


def _said(delta: Mapping[str, Any]) -> str:
    """Return the text of an event of a chat, reasoning included: users wait for those tokens, too."""
    return "".join(delta.get(name) or "" for name in ("reasoning_content", "reasoning", "content"))
