"""The endpoints of the HTTP API: each one's route, body, answer and statuses. Handlers are named in app.py.

The application (app.py) serves exactly these, and the OpenAPI document (openapi.py) describes exactly these.
"""

from dataclasses import dataclass

from pydantic import BaseModel

from router.http.schema import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody

_EVERYWHERE = (400, 405, 431)
"""Statuses of malformed HTTP, of another method, and of a head without an end."""
_IDENTIFIED = (401,)
_WITH_BODY = (401, 408, 413, 503)
_GENERATION = (*_WITH_BODY, 404, 429, 500, 504)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and its method."""

    name: str
    method: str
    path: str
    """Path as Starlette writes it."""
    summary: str
    answer: str
    """Schema of the answer (openapi.py), or the content type of one that is not JSON."""
    errors: tuple[int, ...] = ()
    body: type[BaseModel] | None = None

    @property
    def can_stream(self) -> bool:
        """Whether the answer may be a stream of events."""
        return self.body is not None and issubclass(self.body, GenerationBody)

    @property
    def statuses(self) -> tuple[int, ...]:
        """Every status with which a request may end."""
        return (200, *sorted({*_EVERYWHERE, *self.errors}))

    @property
    def public_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")


def _get(name: str, path: str, summary: str, answer: str, *errors: int) -> Endpoint:
    return Endpoint(name, "GET", path, summary, answer, errors)


def _post(name: str, path: str, summary: str, answer: str, body: type[BaseModel], *errors: int) -> Endpoint:
    return Endpoint(name, "POST", path, summary, answer, errors, body)


ENDPOINTS: tuple[Endpoint, ...] = (
    _post("completions", "/v1/completions", "Continue one or more texts", "Completion", CompletionBody, *_GENERATION),
    _post("chat", "/v1/chat/completions", "Answer a conversation", "ChatCompletion", ChatBody, *_GENERATION),
    _get("models", "/v1/models", "The served models", "Models", *_IDENTIFIED),
    _get("model", "/v1/models/{name:path}", "One served model", "Model", *_IDENTIFIED, 404, 503),
    _post("tokenize", "/tokenize", "Text or a conversation to tokens", "Tokens", TokenizeBody, *_WITH_BODY, 404),
    _post("detokenize", "/detokenize", "Tokens to text", "Text", DetokenizeBody, *_WITH_BODY, 404),
    _get("health", "/health", "Whether a request that came now would be served", "Status", 503),
    _get("live", "/live", "Whether the router's process answers", "Status"),
    _get("metrics", "/metrics", "The router's Prometheus metrics, without router.auth", "text/plain", 404),
    _get("version", "/version", "The version of kvrelay", "Version"),
    _get("openapi", "/openapi.json", "This document", "Document"),
)
