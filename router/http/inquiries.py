"""The endpoints that generate nothing: models, tokens, metrics, version and the OpenAPI document."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from common.errors import InvalidRequest, WorkerLost
from common.tokens import TokenArray
from common.version import installed_version
from common.wire import check_length
from kvrelay.v1 import inference_pb2 as pb
from router.doors.front_door import FrontDoor
from router.doors.readers import Reading
from router.fleet.facts import ModelFacts
from router.http.anthropic.calls import conversation_of
from router.http.anthropic.schema import CountTokensBody
from router.http.bodies import read_body
from router.http.calls import read_token_ids
from router.http.errors import NOT_FOUND, HttpError
from router.http.exchange import Exchange
from router.http.json_parts import PART_VALUES, joined_parts, quote
from router.http.messages import read_chat_prompt, read_messages
from router.http.routes import openapi_document
from router.http.schema import DetokenizeBody, TokenizeBody
from router.http.strict import parse_body
from router.http.tools import foreign_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall:
    """A text or a conversation whose tokens are asked for."""

    model: str | None
    text: str | None = None
    chat: pb.ChatPrompt = field(default_factory=pb.ChatPrompt)
    """Read where there is no text."""
    wants_pieces: bool = False
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeCall:
    """Tokens whose text is asked for."""

    model: str | None
    token_ids: pb.TokenIds
    left_out: Sequence[str] = ()


def read_tokenize(raw: bytes) -> TokenizeCall:
    """Return the call of a `/tokenize` body. Raises InvalidRequest."""
    body = parse_body(TokenizeBody, raw)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("one of prompt and messages must be set", field="prompt")
    chat = pb.ChatPrompt(messages=[] if body.messages is None else read_messages(body.messages))
    return TokenizeCall(
        model=body.model, text=body.prompt, chat=chat, wants_pieces=bool(body.return_token_strs), left_out=body.left_out
    )


def read_count_tokens(raw: bytes) -> TokenizeCall:
    """Return the call of a `/v1/messages/count_tokens` body. Raises InvalidRequest."""
    body = parse_body(CountTokensBody, raw)
    chat = conversation_of(body)
    left_out = (*body.left_out, *foreign_tools(chat.tools or ()))
    return TokenizeCall(model=body.model, chat=read_chat_prompt(chat), left_out=left_out)


def read_detokenize(raw: bytes) -> DetokenizeCall:
    """Return the call of a `/detokenize` body. Raises InvalidRequest."""
    body = parse_body(DetokenizeBody, raw)
    token_ids = pb.TokenIds(ids=read_token_ids(body.tokens, "tokens"))
    return DetokenizeCall(model=body.model, token_ids=token_ids, left_out=body.left_out)


_TOKENIZE = Reading(read_tokenize, TokenizeCall)
_COUNT_TOKENS = Reading(read_count_tokens, TokenizeCall)
_DETOKENIZE = Reading(read_detokenize, DetokenizeCall)


class Inquiries:
    """Handlers; each sends a whole response or raises KvrelayError."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._started = int(time.time())
        self._openapi: bytes | None = None
        """Set once it has been asked for."""

    async def models(self, exchange: Exchange) -> None:
        """`GET /v1/models`."""
        self._door.identify(exchange.metadata)
        model = self._door.parts.fleet.model
        data = [] if model is None else [self._model(model, each) for each in model.names]
        exchange.finish_json({"object": "list", "data": data})

    async def model(self, exchange: Exchange) -> None:
        """`GET /v1/models/{name}`; a name may hold slashes, and without one it is the list. Raises UnknownModel."""
        name = exchange.scope["path_params"]["name"]
        if not name:
            await self.models(exchange)
            return
        self._door.identify(exchange.metadata)
        exchange.finish_json(self._model(served_model(self._door, name), name))

    async def tokenize(self, exchange: Exchange) -> None:
        """`POST /tokenize`: text, or a conversation as the chat template renders it."""
        tenant, call = await read_body(self._door, exchange, _TOKENIZE, needs_worker=False)
        model, reader = served_model(self._door, call.model), self._door.reader
        with self._door.tokenizing(tenant):
            if call.text is not None:
                token_ids = await reader.encode_text(call.text, model, tenant=tenant)
            else:
                token_ids = (await reader.encode_chat(call.chat, model, tenant=tenant)).token_ids
            pieces = await reader.pieces(token_ids, tenant=tenant) if call.wants_pieces else ()
        exchange.finish_parts(_tokenized(token_ids, pieces if call.wants_pieces else None, model))

    async def count_tokens(self, exchange: Exchange) -> None:
        """`POST /v1/messages/count_tokens`: the tokens of the conversation's prompt."""
        tenant, call = await read_body(self._door, exchange, _COUNT_TOKENS, needs_worker=False)
        model = served_model(self._door, call.model)
        with self._door.tokenizing(tenant):
            encoded = await self._door.reader.encode_chat(call.chat, model, tenant=tenant)
        exchange.finish_json({"input_tokens": len(encoded.token_ids)})

    async def detokenize(self, exchange: Exchange) -> None:
        """`POST /detokenize`."""
        tenant, call = await read_body(self._door, exchange, _DETOKENIZE, needs_worker=False)
        model, ids = served_model(self._door, call.model), call.token_ids.ids
        check_length(len(ids), model.max_model_len, field="tokens")
        if ids and max(ids) >= model.vocab_size:
            raise InvalidRequest(f"token {max(ids)} is not in the vocabulary of {model.vocab_size}", field="tokens")
        with self._door.tokenizing(tenant):
            text = await self._door.reader.decode(ids, tenant=tenant)
        exchange.finish_json({"prompt": text})

    async def metrics(self, exchange: Exchange) -> None:
        """`GET /metrics`: only without router.auth, since labels name tenants. Raises HttpError."""
        if self._door.parts.config.auth != "none":
            raise HttpError("with router.auth, metrics are on router.metrics_port alone", NOT_FOUND)
        text = await asyncio.to_thread(generate_latest, self._door.parts.metrics.registry)
        exchange.finish_body(text, CONTENT_TYPE_LATEST)

    async def live(self, exchange: Exchange) -> None:
        """`GET /live`: the process answers, with or without workers."""
        exchange.finish_json({"status": "ok"})

    async def version(self, exchange: Exchange) -> None:
        """`GET /version`."""
        exchange.finish_json({"version": installed_version()})

    async def openapi(self, exchange: Exchange) -> None:
        """`GET /openapi.json`."""
        if self._openapi is None:
            self._openapi = await asyncio.to_thread(lambda: quote(openapi_document()).encode())
        exchange.finish_body(self._openapi, "application/json")

    def _model(self, model: ModelFacts, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvrelay",
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }


def served_model(door: FrontDoor, name: str | None) -> ModelFacts:
    """Return the served model. Raises UnknownModel, or WorkerLost before a worker has reported it."""
    model = door.parts.fleet.model
    if model is None:
        raise WorkerLost("no decode worker is ready")
    model.check_name(name or "")
    return model


def _tokenized(token_ids: TokenArray, pieces: Sequence[str] | None, model: ModelFacts) -> Iterator[str]:
    """Yield the answer to `/tokenize` in parts."""
    starts = range(0, len(token_ids), PART_VALUES)
    yield f'{{"count": {len(token_ids)}, "max_model_len": {model.max_model_len}, "tokens": ['
    yield from joined_parts(token_ids[start : start + PART_VALUES].tolist() for start in starts)
    if pieces is not None:
        yield '], "token_strs": ['
        yield from joined_parts(list(pieces[start : start + PART_VALUES]) for start in starts)
    yield "]}"
