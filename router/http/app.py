"""The ASGI application of the HTTP API: routes, and the rules that all endpoints share.

1. The handler runs beside `Exchange.listen`; whichever ends first ends the other. So a client that leaves cancels its
   request at once, in any state.
2. A handler only states how the response ends. The response ends once everything that the request held is free.
3. An exception becomes one terminal answer: a status with a JSON body, or an event in a stream that has begun.
4. While the router stops, new calls are refused; calls that outlast the grace end with the same error.
5. Requests never take all connections (connections.py): inquiries, health among them, are always answered.
6. Pages of other sites are refused where there are no API keys (browsers.py), on every path.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from prometheus_client import Counter
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import EngineFault, KvrelayError, Overloaded
from common.metering import Metered
from common.rpc import to_report
from common.structured import TaskTracker
from router.diagnosis.status import StatusReporter
from router.doors.front_door import FrontDoor
from router.http.answers import in_style
from router.http.anthropic.answers import message_answers
from router.http.anthropic.calls import body_field as message_field
from router.http.anthropic.calls import read_messages_body
from router.http.browsers import BrowserRules
from router.http.connections import Connections
from router.http.embeddings import Embeddings
from router.http.errors import (
    CLIENT_CLOSED_REQUEST,
    FULL,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    OPENAI,
    STOPPING,
    Headers,
    HttpError,
)
from router.http.exchange import Exchange
from router.http.generation import GenerationEndpoint, read_chat, read_completion
from router.http.inquiries import Inquiries
from router.http.page.handlers import PAGE_HEADERS, PageHandlers
from router.http.responses.answer import response_answer
from router.http.responses.call import read_response
from router.http.routes import ENDPOINTS, Endpoint
from router.http.styles import ChatStyle, CompletionStyle

logger = logging.getLogger(__name__)

Handler = Callable[[Exchange], Coroutine[Any, Any, None]]

_LAST_WORDS_TIMEOUT_S = 1.0
"""Limit on sending the last error to a client that does not read."""
_FULL_RETRY_S = 1.0
_MIB = 1 << 20


class HttpApp:
    """All endpoints. Event loop only."""

    def __init__(
        self, door: FrontDoor, reporter: StatusReporter, connections: Connections, names: Sequence[str] = ()
    ) -> None:
        """Take `names`, those of the router's certificate."""
        metrics = door.parts.metrics
        metrics.watch("kvrelay_http_connections", "Open connections", lambda: connections.num_open)
        metrics.watch(
            "kvrelay_http_connections_dropped",
            "Silent connections closed for new ones",
            lambda: connections.num_dropped,
        )
        self._door = door
        self.browsers = BrowserRules(door.parts.config, names)
        self.connections = connections
        self._max_requests = connections.most_requests
        self.responses = Counter(
            "kvrelay_http_responses",
            "HTTP requests ended; status 499: the client left",
            ["path", "status"],
            registry=metrics.registry,
        )
        self._tracker = TaskTracker()
        self._running: dict[Exchange, asyncio.Task[None]] = {}
        self._all_ended = asyncio.Event()
        self._is_stopping = False
        self._page = PageHandlers(door, reporter)
        self.asgi: ASGIApp = self._router(door, self._page)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end for `grace_s` seconds, then cancel them with an error."""
        self._is_stopping = True
        self._page.stop()
        if self._running and grace_s > 0:
            self._all_ended.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._all_ended.wait()
        for handling in self._running.values():
            handling.cancel()

    def _router(self, door: FrontDoor, page: PageHandlers) -> Router:
        max_body_bytes = door.parts.config.max_message_mib * _MIB
        inquiries = Inquiries(door)
        completions = GenerationEndpoint(
            door, read=read_completion, answer=in_style(CompletionStyle), prompt_field="prompt"
        )
        chat = GenerationEndpoint(door, read=read_chat, answer=in_style(ChatStyle), prompt_field="messages")
        messages = GenerationEndpoint(
            door,
            read=read_messages_body,
            answer=message_answers(door),
            prompt_field="messages",
            body_field=message_field,
        )
        handlers: dict[str, Handler] = {
            "completions": completions,
            "chat": chat,
            "embeddings": Embeddings(door),
            "responses": GenerationEndpoint(door, read=read_response, answer=response_answer, prompt_field="input"),
            "messages": messages,
            "count_tokens": inquiries.count_tokens,
            "models": inquiries.models,
            "model": inquiries.model,
            "tokenize": inquiries.tokenize,
            "detokenize": inquiries.detokenize,
            "health": self._health,
            "live": inquiries.live,
            "metrics": inquiries.metrics,
            "version": inquiries.version,
            "openapi": inquiries.openapi,
            "page": partial(page.file, "page.html"),
            "page_css": partial(page.file, "page.css"),
            "page_script": partial(page.file, "page.js"),
            "cluster": page.cluster,
        }

        def served(handlers: Mapping[str, Handler], endpoint: Endpoint | None = None) -> ASGIApp:
            return _Served(self, handlers, endpoint, max_body_bytes=max_body_bytes)

        routes = [Route(each.path, served({each.method: handlers[each.name]}, each)) for each in ENDPOINTS]
        return Router(routes, default=served({}), redirect_slashes=False)

    async def _health(self, exchange: Exchange) -> None:
        """`GET /health`: whether a new request would be served now. Raises KvrelayError."""
        error = _stopping() if self._is_stopping else self._door.obstacle
        if error is not None:
            raise error
        exchange.finish_json({"status": "ok"})

    async def serve(self, exchange: Exchange, handler: Handler) -> int:
        """Answer one request; returns its status, 499 when the client has left."""
        async with self._tracker.owned(Metered(handler(exchange)), exchange.listen()) as (handling, listening):
            self._running[exchange] = handling
            try:
                await asyncio.wait((handling, listening), return_when=asyncio.FIRST_COMPLETED)
            finally:
                del self._running[exchange]
                if not self._running:
                    self._all_ended.set()
        error = self._failure(exchange, handling)
        if exchange.is_gone:
            return CLIENT_CLOSED_REQUEST
        if error is None:
            try:
                await exchange.close()
            except Overloaded as refused:
                error = refused
        if error is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_TIMEOUT_S if self._is_stopping else None):
                    await exchange.fail(error)
        return exchange.status

    def _failure(self, exchange: Exchange, handling: "asyncio.Task[None]") -> KvrelayError | None:
        """Return the error to report for a handler's end, None for success; logs unexpected exceptions."""
        if handling.cancelled():
            return _stopping() if self._is_stopping else EngineFault("the work behind the request was cancelled")
        failure = handling.exception()
        assert failure is None or isinstance(failure, Exception)
        return None if failure is None else to_report(failure, exchange.scope["path"])

    def choose(self, handlers: Mapping[str, Handler], exchange: Exchange) -> Handler:
        """Return the handler of a request to a path with these handlers by method, or one that refuses it."""
        method = "GET" if exchange.method == "HEAD" else exchange.method
        refusal = self.browsers.refusal(method, exchange.headers)
        if refusal is not None:
            return _refusing(refusal)
        if self.browsers.is_preflight(method, exchange.headers):
            return _agree
        if not handlers:
            error = HttpError(f"there is nothing at {exchange.scope['path'][:80]}", NOT_FOUND)
        elif method not in handlers:
            error = HttpError(f"{exchange.method[:20]}: here it is {', '.join(handlers)}", METHOD_NOT_ALLOWED)
        elif self._is_stopping and method == "POST":
            error = _stopping()
        elif len(self._running) >= self._max_requests and method == "POST":
            error = HttpError("as many requests run as there are connections for", FULL, retry_after_s=_FULL_RETRY_S)
        else:
            return handlers[method]
        return _refusing(error)


class _Served:
    """One path. A class, because Starlette passes a function a request instead of the raw ASGI arguments."""

    def __init__(
        self, app: HttpApp, handlers: Mapping[str, Handler], endpoint: Endpoint | None, *, max_body_bytes: int
    ) -> None:
        """`endpoint`: None for all paths at which there is nothing."""
        self._app = app
        self._path = "unknown" if endpoint is None else endpoint.path
        self._dialect = OPENAI if endpoint is None else endpoint.dialect
        self._is_for_tenants = endpoint is not None and HTTPStatus.UNAUTHORIZED in endpoint.statuses
        self._headers = PAGE_HEADERS if endpoint is not None and endpoint.is_of_page else []
        self._handlers = handlers
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [*self._headers, *self._app.browsers.answer_headers(scope["method"], scope["headers"])]
        if headers:
            send = _with_headers(send, headers)
        exchange = Exchange(scope, receive, send, max_body_bytes=self._max_body_bytes, dialect=self._dialect)
        status = await self._app.serve(exchange, self._app.choose(self._handlers, exchange))
        if self._is_for_tenants and status == HTTPStatus.OK:
            self._app.connections.recognize(scope["state"]["connection"])
        self._app.responses.labels(self._path, str(status)).inc()
        extra = {"request_id": exchange.request_id, "path": self._path, "status": status}
        logger.debug("HTTP request ended", extra=extra)


def _with_headers(send: Send, headers: Headers) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *headers]
        await send(message)

    return send_with_headers


async def _agree(exchange: Exchange) -> None:
    """Answer a preflight; what the page may do is in the headers."""
    exchange.finish_body(b"", "text/plain")


def _refusing(error: KvrelayError) -> Handler:
    async def refuse(exchange: Exchange) -> None:
        raise error

    return refuse


def _stopping() -> HttpError:
    return HttpError("the router is stopping", STOPPING)
