"""What the door answers: every route, what it takes, and with which statuses it may end. No handler is named here.

The application (app.py) serves exactly these, and the OpenAPI document (openapi.py) tells of exactly these.
"""

from dataclasses import dataclass

from pydantic import BaseModel

from router.http.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_EVERYWHERE = (400, 405, 431)
"""Bytes that are no HTTP, another method, a head without an end."""
_IDENTIFIED = (401,)
_BODY = (408, 413, 503)
_GENERATION = (404, 429, 500, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One path and its method."""

    name: str
    method: str
    path: str
    """As Starlette writes it."""
    summary: str
    body: type[BaseModel] | None = None
    answer: str
    """Schema of the answer (openapi.py), or the content type of one that is no JSON."""
    can_stream: bool = False
    errors: tuple[int, ...] = ()

    @property
    def statuses(self) -> tuple[int, ...]:
        """Every status with which a request may end."""
        return (200, *sorted({*_EVERYWHERE, *self.errors}))

    @property
    def public_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        name="completions",
        method="POST",
        path="/v1/completions",
        summary="Continue one or more texts",
        body=CompletionBody,
        answer="Completion",
        can_stream=True,
        errors=(*_IDENTIFIED, *_BODY, *_GENERATION),
    ),
    Endpoint(
        name="chat",
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a conversation",
        body=ChatBody,
        answer="ChatCompletion",
        can_stream=True,
        errors=(*_IDENTIFIED, *_BODY, *_GENERATION),
    ),
    Endpoint(
        name="models",
        method="GET",
        path="/v1/models",
        summary="The served models",
        answer="Models",
        errors=_IDENTIFIED,
    ),
    Endpoint(
        name="model",
        method="GET",
        path="/v1/models/{name:path}",
        summary="One served model",
        answer="Model",
        errors=(*_IDENTIFIED, 404, 503),
    ),
    Endpoint(
        name="tokenize",
        method="POST",
        path="/tokenize",
        summary="Text or a conversation to tokens",
        body=TokenizeBody,
        answer="Tokens",
        errors=(*_IDENTIFIED, *_BODY, 404),
    ),
    Endpoint(
        name="detokenize",
        method="POST",
        path="/detokenize",
        summary="Tokens to text",
        body=DetokenizeBody,
        answer="Text",
        errors=(*_IDENTIFIED, *_BODY, 404),
    ),
    Endpoint(
        name="health",
        method="GET",
        path="/health",
        summary="Whether a request that came now would be served",
        answer="Status",
        errors=(503,),
    ),
    Endpoint(name="live", method="GET", path="/live", summary="Whether the router's process answers", answer="Status"),
    Endpoint(
        name="metrics",
        method="GET",
        path="/metrics",
        summary="The router's Prometheus metrics, without router.auth",
        answer="text/plain",
        errors=(404,),
    ),
    Endpoint(name="version", method="GET", path="/version", summary="The version of kvrelay", answer="Version"),
    Endpoint(name="openapi", method="GET", path="/openapi.json", summary="This document", answer="Document"),
)
