"""Maps the responses of HTTP servers to our errors."""

import json
from collections.abc import Mapping
from typing import Any

from common.errors import (
    AccessDenied,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    PromptTooLong,
    Unauthenticated,
    UnknownModel,
)

_KINDS: Mapping[int, type[KvrelayError]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    403: AccessDenied,
    404: UnknownModel,
    408: DeadlineExceeded,
    413: PromptTooLong,
    422: InvalidRequest,
    429: Overloaded,
    503: Overloaded,
    504: DeadlineExceeded,
}
_LONGEST = 300


def error_of(status: int, body: bytes, headers: Mapping[str, str]) -> KvrelayError:
    """Return the error of a response with a status other than 2xx."""
    message, field = _told(body)
    kind = _KINDS.get(status, InvalidRequest if 400 <= status < 500 else EngineFault)
    return kind(f"HTTP {status}: {message}", field=field, retry_after_s=_seconds(headers.get("Retry-After")))


def error_in_stream(error: Any) -> KvrelayError:
    """Return the error that a server sends within an answer, after its status."""
    code = error.get("code") if isinstance(error, Mapping) else None
    kind = _KINDS.get(code, EngineFault) if isinstance(code, int) else EngineFault
    return kind(str(error.get("message", error) if isinstance(error, Mapping) else error)[:_LONGEST])


def _told(body: bytes) -> tuple[str, str]:
    """Return message and field of a body in the form of OpenAI or of other servers."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:_LONGEST], ""
    inner = parsed.get("error", parsed) if isinstance(parsed, Mapping) else parsed
    if not isinstance(inner, Mapping):
        return str(inner)[:_LONGEST], ""
    return str(inner.get("message") or inner.get("detail") or inner)[:_LONGEST], str(inner.get("param") or "")


def _seconds(retry_after: str | None) -> float | None:
    """Return a Retry-After in seconds; None for a date, which needs the server's clock."""
    try:
        return float(retry_after) if retry_after else None
    except ValueError:
        return None
