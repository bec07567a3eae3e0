"""Load target for servers with OpenAI's HTTP API, and the probe for its extensions."""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from common.errors import DeadlineExceeded, InvalidRequest, KvrelayError, UnknownModel, Unreachable
from kvrelay.client.chat import ChatMessage
from kvrelay.client.tls import resolve
from measure.load.records import PoolSample
from measure.load.targets.completion import AnswerReader, CompletionReader, SseReader, error_of
from measure.load.targets.exposition import pool_sample
from measure.load.targets.interface import (
    ChunkSink,
    Feature,
    PreparedCall,
    TargetAnswer,
    TargetInfo,
    TargetRequest,
    TargetSpec,
)

_EXTRAS = (Feature.IGNORE_EOS, Feature.MIN_TOKENS, Feature.TOKEN_IDS)
_PROBE_TIMEOUT_S = 120.0
"""The first request may compile kernels."""
_TEXT = "Hello"
_CHAT = (ChatMessage(role="user", content=_TEXT),)

Send = Callable[[TargetRequest, Sequence[Feature]], Awaitable[TargetAnswer]]
"""Sends a request with the given extensions. Raises KvrelayError."""
_SHORT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 2.0
"""Servers silently drop idle connections after 5 s (uvicorn) or more: a request must not use one that is about to be
dropped."""
_OUR_OWN = "kvrelay"
_NO_IGNORE_EOS = "the server does not support ignore_eos: answers may be shorter than asked for"


async def find_features(send: Send, *, takes_report: bool) -> tuple[Feature, ...]:
    """Return the extensions of the server: all, all but token ids, or none. Raises KvrelayError.

    Sends requests of two tokens; a chat where the server cannot complete text.
    """
    ours = (Feature.REPORT,) if takes_report else ()
    refusal: KvrelayError | None = None
    for features in ((*_EXTRAS, *ours), (*_EXTRAS[:2], *ours), ()):
        for prompt in (_TEXT, _CHAT):
            try:
                answer = await send(_request(prompt), features)
            except Unreachable:
                raise
            except KvrelayError as error:
                refusal = error
                continue
            has_ids = answer.token_ids is not None
            return tuple(one for one in features if has_ids or one is not Feature.TOKEN_IDS)
    raise refusal or InvalidRequest("the server accepts neither text nor chats")


def _request(prompt: Any) -> TargetRequest:
    return TargetRequest(
        prompt=prompt,
        num_prompt_tokens=1,
        num_output_tokens=2,
        seed=0,
        timeout_s=_PROBE_TIMEOUT_S,
        wants_token_ids=True,
    )


class OpenAiTarget:
    """A `Target` for `/v1/completions` (token ids, text) and `/v1/chat/completions`. Streams; greedy.

    All data of one socket read counts as one piece of the answer. There is a connection per request in flight; setting
    one up is part of the latency, as it is for users.
    """

    def __init__(self, spec: TargetSpec) -> None:
        self.spec = spec
        url = spec.url.rstrip("/")
        self._base = url if urlsplit(url).path else f"{url}/v1"
        self._root = self._base.removesuffix("/v1")
        self._model = spec.model
        self._headers = {"Authorization": f"Bearer {spec.api_key}"} if spec.api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._has_metrics = True

    @property
    def name(self) -> str:
        """Kind and address."""
        return f"OpenAI API at {self._base}"

    async def describe(self) -> TargetInfo:
        """Ask for models and version, and probe extensions with short requests. Raises KvrelayError."""
        models = [model for model in (await self._get_json(f"{self._base}/models")).get("data", ()) if "id" in model]
        model = next((one for one in models if one["id"] == self._model), models[0] if models else None)
        if model is None:
            raise UnknownModel(f"{self.name} serves no model")
        self._model = self._model or str(model["id"])
        features = await find_features(self._send, takes_report=model.get("owned_by") == _OUR_OWN)
        self.spec = replace(self.spec, model=self._model, features=features)
        try:
            version = (await self._get_json(f"{self._root}/version")).get("version", "")
        except KvrelayError:
            version = ""
        return TargetInfo(
            system=f"{model.get('owned_by', 'unknown')} {version}".strip(),
            model=self._model,
            max_model_len=model.get("max_model_len"),
            vocab_size=model.get("vocab_size"),
            num_workers={},
            takes_objectives=Feature.REPORT in features,
            notes=() if Feature.IGNORE_EOS in features else (_NO_IGNORE_EOS,),
        )

    def prepare(self, request: TargetRequest) -> PreparedCall:
        """Return a call with a finished body."""
        path, body = self._body(request, self.spec.features or ())
        raw = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()

        async def call(on_chunk: ChunkSink) -> TargetAnswer:
            return await self._call(path, raw, request.timeout_s, on_chunk)

        return call

    async def sample(self, at_s: float) -> PoolSample | None:
        """Return the state in `/metrics`. Raises KvrelayError."""
        if not self._has_metrics:
            return None
        try:
            sample = pool_sample((await self._get(f"{self._root}/metrics")).decode(), at_s)
        except InvalidRequest:  # no such page
            sample = None
        self._has_metrics = sample is not None
        return sample

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _call(self, path: str, body: bytes, timeout_s: float, on_chunk: ChunkSink) -> TargetAnswer:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(path, body, on_chunk)
        except TimeoutError:
            raise DeadlineExceeded(f"no complete answer after {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from None

    async def _exchange(self, path: str, body: bytes, on_chunk: ChunkSink) -> TargetAnswer:
        headers = {"Content-Type": "application/json"}
        async with self._connections().post(f"{self._base}{path}", data=body, headers=headers) as response:
            if response.status != 200:
                raise error_of(response.status, await response.read())
            events, answer = SseReader(), self._reader()
            async for received in response.content.iter_any():
                counts = [count for data in events.feed(received) if (count := answer.take(data)) is not None]
                if counts:
                    on_chunk(sum(counts))
            return answer.build()

    def _reader(self) -> AnswerReader:
        return CompletionReader()

    def _body(self, request: TargetRequest, features: Sequence[Feature]) -> tuple[str, dict[str, Any]]:
        """Return path and body."""
        prompt = request.prompt
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if Feature.IGNORE_EOS in features:
            body["ignore_eos"] = True
        if Feature.MIN_TOKENS in features:
            body["min_tokens"] = request.num_output_tokens
        if Feature.TOKEN_IDS in features and request.wants_token_ids:
            body["return_token_ids"] = True
        if Feature.REPORT in features:
            wishes = {"timeout_s": request.timeout_s, "ttft_s": request.ttft_slo_s, "tpot_s": request.tpot_slo_s}
            body["kvrelay"] = {"report": True, **{name: value for name, value in wishes.items() if value is not None}}
        if isinstance(prompt, str):
            return "/completions", body | {"prompt": prompt}
        if prompt and isinstance(prompt[0], ChatMessage):
            return "/chat/completions", body | {"messages": [_message(turn) for turn in prompt]}
        return "/completions", body | {"prompt": list(prompt)}

    async def _send(self, request: TargetRequest, features: Sequence[Feature]) -> TargetAnswer:
        path, body = self._body(request, features)
        return await self._call(path, json.dumps(body).encode(), request.timeout_s, lambda _num_tokens: None)

    async def _get_json(self, url: str) -> Mapping[str, Any]:
        try:
            found = json.loads(await self._get(url))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InvalidRequest(f"{url} does not answer with a JSON object")
        return found

    async def _get(self, url: str) -> bytes:
        try:
            async with asyncio.timeout(_SHORT_TIMEOUT_S), self._connections().get(url) as response:
                body = await response.read()
                if response.status != 200:
                    raise InvalidRequest(str(error_of(response.status, body)))
                return body
        except TimeoutError:
            raise Unreachable(f"{url} does not answer within {_SHORT_TIMEOUT_S:g} s") from None
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: aiohttp.ClientError) -> Unreachable:
        if isinstance(error, aiohttp.ClientConnectorError):
            return Unreachable(f"{self._base} cannot be reached: {error.strerror or error}")
        return Unreachable(f"{self._base} broke the connection: {error or type(error).__name__}")

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:  # not in __init__: it belongs to the loop that is running now
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=_ssl(self.spec)),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session


def _ssl(spec: TargetSpec) -> ssl.SSLContext | bool:
    """Return the trust for https URLs: certificates from a file, or the well-known authorities. Raises OSError."""
    tls = resolve(spec.tls)
    return True if isinstance(tls, bool) else ssl.create_default_context(cafile=tls)


def _message(turn: object) -> dict[str, str]:
    assert isinstance(turn, ChatMessage), f"a conversation holds {turn!r}"
    return {"role": turn.role, "content": turn.content}
