"""Callers that are no members of the cluster: what they may try on its ports, and which attempts succeed."""

import asyncio
import secrets
from collections.abc import Mapping
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
from kvrelay.v1 import decode_pb2
from tests.security.listeners import status_of

INSIDE_METHODS = tuple(sorted(method for method, roles in METHODS.items() if Role.CLIENT not in roles))
"""Whatever only members may call."""
PLAIN_TEXT = "in plain text"
NO_CERTIFICATE = "without a certificate"
FOREIGN = "with a certificate of another authority"
_STREAM_TOKENS = "/kvrelay.v1.DirectService/StreamTokens"
_LET_IN = (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Ends of calls that were served, or left hanging."""
_AT_A_TIME = 8
_TIMEOUT_S = 20.0


async def intrusions(listeners: Mapping[str, Role], *, ca: Path, cluster: str) -> list[str]:
    """Call each inside method on each listener (host:port, and whose it is) in every wrong way; return what succeeded.

    Workers are also asked for the tokens of an answer whose capability was never given out. `ca` is public, and so is
    the name of a cluster: the strangers know both.
    """
    places = asyncio.Semaphore(_AT_A_TIME)

    async def at_one(address: str, role: Role, shown: str) -> list[str]:
        calls = [(method, b"") for method in INSIDE_METHODS]
        if role is Role.WORKER and shown == NO_CERTIFICATE:
            made_up = decode_pb2.StreamTokensRequest(capability=secrets.token_bytes(32))
            calls.append((_STREAM_TOKENS, made_up.SerializeToString()))
        async with places, _channel(address, role, shown, ca=ca, cluster=cluster) as channel:
            ends = await asyncio.gather(
                *(status_of(channel, method, message, timeout_s=_TIMEOUT_S) for method, message in calls)
            )
        found = zip(calls, ends, strict=True)
        return [f"{method} {shown} at {address}: {code}" for (method, _), (code, _) in found if code in _LET_IN]

    kinds = (PLAIN_TEXT, NO_CERTIFICATE, FOREIGN)
    found = await asyncio.gather(
        *(at_one(address, role, shown) for address, role in listeners.items() for shown in kinds)
    )
    return [each for at_listener in found for each in at_listener]


async def open_doors(address: str, http_address: str) -> list[str]:
    """Knock at a router's doors in plain text, and by TLS without the authority's certificate; return what answered."""
    found = []
    for tls in (False, True):
        try:
            async with AsyncClient(address, timeout_s=_TIMEOUT_S, tls=tls) as client:
                await client.models()
            found.append(f"{address}, TLS {tls}")
        except KvrelayError:
            pass
        url = f"{'https' if tls else 'http'}://{http_address}/v1/models"
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
                found += [url] * response.ok
        except (aiohttp.ClientError, TimeoutError):
            pass
    return found


def _channel(address: str, role: Role, shown: str, *, ca: Path, cluster: str) -> grpc.aio.Channel:
    """Return a channel that shows something of itself, or nothing."""
    options: list[tuple[str, Any]] = channel_options()
    if shown == PLAIN_TEXT:
        return grpc.aio.insecure_channel(address, options=options)
    key = certificate = None
    if shown == FOREIGN:  # of an authority that calls itself alike
        authority = Authority.new(AuthoritySettings(cluster=cluster, is_encrypted=True))
        held = Credentials.of(authority, Role.CONTROLLER, "controller").held
        key, certificate = held.key_pem, held.certificate_pem
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key, certificate)
    options.append(("grpc.ssl_target_name_override", server_name(cluster, role)))
    return grpc.aio.secure_channel(address, credentials, options=options)
