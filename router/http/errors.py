"""Errors as HTTP has them: a status, a JSON body in the form of an API, and the time to retry.

The form is OpenAI's unless an endpoint has another dialect:

{"error": {"message": …, "type": …, "param": <field or null>, "code": <string or null>}}
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import errors
from common.errors import KvrelayError

Headers = list[tuple[bytes, bytes]]

CLIENT_CLOSED_REQUEST = 499
"""Status in logs and metrics of a request whose client has left."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """HTTP form of a class of errors."""

    status: int
    type: str
    code: str | None = None


class HttpError(KvrelayError):
    """A fault of the HTTP request itself, without a counterpart in gRPC."""

    def __init__(self, message: str, kind: ErrorKind, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.kind = kind


BROKEN_HTTP = ErrorKind(400, "invalid_request_error", "broken_http")
FOREIGN_PAGE = ErrorKind(403, "invalid_request_error", "foreign_page")
NOT_FOUND = ErrorKind(404, "invalid_request_error", "unknown_url")
METHOD_NOT_ALLOWED = ErrorKind(405, "invalid_request_error", "method_not_allowed")
REQUEST_TIMEOUT = ErrorKind(408, "invalid_request_error", "request_timeout")
TOO_LARGE = ErrorKind(413, "invalid_request_error", "request_too_large")
NOT_JSON = ErrorKind(415, "invalid_request_error", "not_json")
UNSUPPORTED_ENCODING = ErrorKind(415, "invalid_request_error", "unsupported_encoding")
HEAD_TOO_LARGE = ErrorKind(431, "invalid_request_error", "head_too_large")
FULL = ErrorKind(503, "server_error", "too_many_requests_running")
STOPPING = ErrorKind(503, "server_error", "stopping")

_LAST = (REQUEST_TIMEOUT, TOO_LARGE, FULL)
"""These end the connection: it would bring only the rest of a body, or takes a place that others need."""

_UNAVAILABLE = ErrorKind(503, "server_error", "unavailable")
_KINDS: dict[type[KvrelayError], ErrorKind] = {
    KvrelayError: ErrorKind(500, "server_error"),
    errors.RequestError: ErrorKind(400, "invalid_request_error"),
    errors.PromptTooLong: ErrorKind(400, "invalid_request_error", "context_length_exceeded"),
    errors.UnknownModel: ErrorKind(404, "invalid_request_error", "model_not_found"),
    errors.Unauthenticated: ErrorKind(401, "invalid_request_error", "invalid_api_key"),
    errors.AccessDenied: ErrorKind(403, "invalid_request_error", "access_denied"),
    errors.ClientGone: ErrorKind(CLIENT_CLOSED_REQUEST, "server_error", "client_gone"),
    errors.Overloaded: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.DeadlineExceeded: ErrorKind(504, "server_error", "deadline_exceeded"),
    errors.Cancelled: _UNAVAILABLE,  # never seen: a client that cancels reads no answer
    errors.Unreachable: _UNAVAILABLE,
    errors.TransferError: _UNAVAILABLE,
    errors.WorkerError: _UNAVAILABLE,
    errors.EngineFault: ErrorKind(500, "server_error", "engine_fault"),
    # Not 500, which client libraries answer by sending the request again.
    errors.CrashSuspected: ErrorKind(422, "invalid_request_error", "crash_suspected"),
}
"""Forms of classes of errors, and of those derived from them."""


def kind_of(error: KvrelayError) -> ErrorKind:
    """Return the HTTP form of an error."""
    if isinstance(error, HttpError):
        return error.kind
    return next(_KINDS[each] for each in type(error).__mro__ if each in _KINDS)


def error_of(error: KvrelayError) -> dict[str, Any]:
    """Return the members of an error's JSON object."""
    kind = kind_of(error)
    return {"message": error.message, "type": kind.type, "param": error.field or None, "code": kind.code}


def error_body(error: KvrelayError) -> bytes:
    """Return the JSON body, which is also the data of the SSE event that ends a stream."""
    return json.dumps({"error": error_of(error)}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Details that all endpoints of one API write alike."""

    error_body: Callable[[KvrelayError], bytes]
    """Returns the JSON of an error."""
    event_open: bytes = b"data: "
    """Bytes before that JSON in the event that ends a stream."""
    sign_of_life: bytes = b": waiting\n\n"
    """Part of a stream that clients leave unread."""
    request_id_header: bytes = b"x-request-id"
    error_schema: str = "Error"
    """Name of the error's schema in the OpenAPI document."""


OPENAI = Dialect(error_body=error_body)


def error_headers(error: KvrelayError) -> Headers:
    """Return the headers that go with an error."""
    headers: Headers = []
    if error.retry_after_s is not None:
        # OpenAI's client prefers the milliseconds; the standard header holds whole seconds.
        headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(error.retry_after_s * 1000))))
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if kind_of(error) in _LAST:
        headers.append((b"connection", b"close"))
    if isinstance(error, errors.Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
