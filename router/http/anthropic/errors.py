"""Errors in the form of Anthropic's API.

{"type": "error", "error": {"type": …, "message": …, "param": <field or null>}}
"""

import json
from collections.abc import Mapping
from typing import Any

from common.errors import KvrelayError
from router.http.errors import Dialect, kind_of

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: KvrelayError) -> bytes:
    """Return the JSON body, which is also the data of the event that ends a stream."""
    document: dict[str, Any] = {
        "type": error_type(kind_of(error).status),
        "message": _named(error),
        "param": error.field or None,  # not in Anthropic's API
    }
    return json.dumps({"type": "error", "error": document}).encode()


def error_type(status: int) -> str:
    """Return Anthropic's name for errors of a status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def _named(error: KvrelayError) -> str:
    """Return the message with the name of the field, which clients show nowhere else."""
    return error.message if error.field in error.message else f"{error.field}: {error.message}"


ANTHROPIC = Dialect(
    error_body=error_body,
    event_open=b"event: error\ndata: ",
    sign_of_life=b'event: ping\ndata: {"type": "ping"}\n\n',
    request_id_header=b"request-id",
    error_schema="AnthropicError",
)
