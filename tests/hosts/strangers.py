"""Callers that are no members of the cluster: what they may try on its ports, and what each attempt is told."""

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from common.errors import KvrelayError
from common.rpc import channel_options
from common.trust.access import METHODS
from common.trust.authority import Authority, AuthoritySettings
from common.trust.credentials import Credentials
from common.trust.identity import Role, server_name
from kvrelay.client import AsyncClient
from kvrelay.v1 import decode_pb2, decode_pb2_grpc

INSIDE_METHODS = tuple(sorted(method for method, roles in METHODS.items() if Role.CLIENT not in roles))
"""Whatever only members may call."""
PLAIN_TEXT = "in plain text"
NO_CERTIFICATE = "without a certificate"
FOREIGN = "with a certificate of another authority"
_AT_A_TIME = 8
_TIMEOUT_S = 20.0
_MAX_CHARS = 200
_ADDRESS = re.compile(r"(ipv4:)?\d+\.\d+\.\d+\.\d+:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One call by a stranger."""

    at: str
    """Which listener."""
    method: str
    shown: str
    """Credentials that it shows."""
    code: str
    told: str

    @property
    def was_let_in(self) -> bool:
        """Whether the call was served, or left hanging."""
        return self.code in ("OK", "DEADLINE_EXCEEDED")


async def call_everything(listeners: Mapping[str, Role], *, ca: Path, cluster: str) -> list[Attempt]:
    """Call every inside method on every listener (host:port, and whose it is) in every wrong way there is.

    `ca` is public, and so is the name of a cluster: the strangers know both.
    """
    places = asyncio.Semaphore(_AT_A_TIME)

    async def at_one(address: str, role: Role, shown: str) -> list[Attempt]:
        async with places, _channel(address, role, shown, ca=ca, cluster=cluster) as channel:
            return await asyncio.gather(*(_call(channel, address, method, shown) for method in INSIDE_METHODS))

    kinds = (PLAIN_TEXT, NO_CERTIFICATE, FOREIGN)
    told = await asyncio.gather(
        *(at_one(address, role, shown) for address, role in listeners.items() for shown in kinds)
    )
    return [attempt for attempts in told for attempt in attempts]


async def stream_with_made_up_capability(addresses: Iterable[str], *, ca: Path, cluster: str) -> list[Attempt]:
    """Ask every listener of workers for the tokens of an answer whose capability was never given out."""

    async def at_one(address: str) -> Attempt:
        async with _channel(address, Role.WORKER, NO_CERTIFICATE, ca=ca, cluster=cluster) as channel:
            request = decode_pb2.StreamTokensRequest(capability=secrets.token_bytes(32))
            call = decode_pb2_grpc.DirectServiceStub(channel).StreamTokens(request, timeout=_TIMEOUT_S)
            return await _outcome(call, address, "StreamTokens", "with a made-up capability")

    return await asyncio.gather(*(at_one(address) for address in addresses))


async def knock_without_trust(address: str, http_address: str) -> list[Attempt]:
    """Knock at a router's doors in plain text, and by TLS without its authority's certificate, as clients do."""
    attempts = []
    for shown, tls in ((PLAIN_TEXT, False), ("by TLS without the cluster's ca.pem", True)):
        code, told = "OK", ""
        try:
            async with AsyncClient(address, timeout_s=_TIMEOUT_S, tls=tls) as client:
                await client.models()
        except KvrelayError as error:
            code, told = type(error).__name__, error.message
        attempts.append(Attempt(at=address, method="models()", shown=shown, code=code, told=told))
        attempts.append(await _get(f"{'https' if tls else 'http'}://{http_address}/v1/models", shown))
    return attempts


def describe(attempts: Sequence[Attempt]) -> str:
    """Return a line for each kind of attempt and each answer to it, the most frequent one first."""
    lines = []
    for shown in dict.fromkeys(attempt.shown for attempt in attempts):
        answers = Counter(f"{each.code}: {_anywhere(each.told)}" for each in attempts if each.shown == shown)
        lines += [f"{number:4} {shown}: {answer[:_MAX_CHARS]}" for answer, number in answers.most_common()]
    return "\n".join(lines)


def _anywhere(told: str) -> str:
    """Return what was told, less where, and less how gRPC begins all of it."""
    told = told.removeprefix("failed to connect to all addresses; last error: ")
    return _ADDRESS.sub("HOST:PORT", told)


class _channel:
    """A channel that shows something of itself, or nothing."""

    def __init__(self, address: str, role: Role, shown: str, *, ca: Path, cluster: str) -> None:
        options: list[tuple[str, Any]] = channel_options()
        if shown == PLAIN_TEXT:
            self._channel = grpc.aio.insecure_channel(address, options=options)
            return
        key = certificate = None
        if shown == FOREIGN:  # of an authority that calls itself alike
            authority = Authority.new(AuthoritySettings(cluster=cluster, is_encrypted=True))
            held = Credentials.of(authority, Role.CONTROLLER, "controller").held
            key, certificate = held.key_pem, held.certificate_pem
        credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key, certificate)
        options.append(("grpc.ssl_target_name_override", server_name(cluster, role)))
        self._channel = grpc.aio.secure_channel(address, credentials, options=options)

    async def __aenter__(self) -> grpc.aio.Channel:
        return self._channel

    async def __aexit__(self, *_error: object) -> None:
        await self._channel.close()


async def _call(channel: grpc.aio.Channel, address: str, method: str, shown: str) -> Attempt:
    start: Any = channel.unary_stream(method)  # on the wire all kinds of calls begin alike
    return await _outcome(start(b"", timeout=_TIMEOUT_S), address, method, shown)


async def _outcome(call: Any, address: str, method: str, shown: str) -> Attempt:
    code, told = "OK", ""
    try:
        async for _ in call:
            break
        else:
            await call.code()
    except grpc.aio.AioRpcError as error:
        code, told = error.code().name, error.details() or ""
    finally:
        call.cancel()
    return Attempt(at=address, method=method, shown=shown, code=code, told=told)


async def _get(url: str, shown: str) -> Attempt:
    code, told = "OK", ""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session,
            session.get(url) as response,
        ):
            code, told = (str(response.status), response.reason or "") if response.status >= 400 else ("OK", "")
    except (aiohttp.ClientError, TimeoutError) as error:
        code, told = type(error).__name__, str(error)
    return Attempt(at=url, method="GET", shown=shown, code=code, told=told)
