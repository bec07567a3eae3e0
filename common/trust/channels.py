"""Channels inside the cluster: mutually authenticated, with renewed certificates from the next call on.

A channel here is a sequence of real ones. When the certificate is renewed, the next call begins on a new real channel;
the old one is closed when its last call has ended. A call stays on its channel until its end.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import grpc

from common.rpc import Connect, channel_options
from common.trust.credentials import Credentials
from common.trust.identity import Role, server_name
from common.trust.proofs import METADATA_KEY, PROOF_LIFETIME_S, Validity, audience_of
from common.trust.tickets import IssueTicket, issuer

_RENEW_PROOF_S = PROOF_LIFETIME_S / 2


def connect_to(role: Role, credentials: Credentials) -> "Callable[[str], grpc.aio.Channel]":
    """Return a factory of lazy channels to processes of a role (a `common.rpc.Connect`)."""
    return lambda address: InsideChannel(address, role, credentials)


class _Generation:
    """A real channel and the calls on it."""

    def __init__(self, channel: grpc.aio.Channel, number: int) -> None:
        self.channel = channel
        self.number = number
        self.num_calls = 0
        self.is_old = False
        self.multicallables: dict[str, Any] = {}


class InsideChannel(grpc.aio.Channel):
    """A channel to one process of the cluster. Event loop only."""

    def __init__(self, address: str, role: Role, credentials: Credentials) -> None:
        self._address = address
        self._role = role
        self._credentials = credentials
        self._newest: _Generation | None = None
        self._old: set[_Generation] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._proof: tuple[tuple[str, str], ...] = ()
        self._proof_validity = Validity.from_now(0.0)
        self._proof_generation = 0
        self._is_closed = False

    # Used by stubs.

    def _multicallable(self, kind: str, method: str, *codecs: Any, **options: Any) -> Any:
        """Return a function that makes calls of a kind."""

        def call(*request: Any, timeout: float | None = None, metadata: Any = None, **terms: Any) -> Any:
            generation = self._generation()
            multicallable = generation.multicallables.get(method)
            if multicallable is None:
                multicallable = getattr(generation.channel, kind)(method, *codecs, **options)
                generation.multicallables[method] = multicallable
            metadata = (*(metadata or ()), *self._show()) or None
            made = multicallable(*request, timeout=timeout, metadata=metadata, **terms)
            generation.num_calls += 1
            made.add_done_callback(lambda _call: self._ended(generation))
            return made

        return call

    unary_unary = partialmethod(_multicallable, "unary_unary")
    unary_stream = partialmethod(_multicallable, "unary_stream")
    stream_unary = partialmethod(_multicallable, "stream_unary")
    stream_stream = partialmethod(_multicallable, "stream_stream")

    # Connection.

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        """Return the state of the newest real channel."""
        return self._generation().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the newest real channel is in another state."""
        await self._generation().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the newest real channel is connected."""
        await self._generation().channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Close every real channel; running calls are cancelled after `grace` seconds."""
        self._is_closed = True
        generations = [*self._old, *((self._newest,) if self._newest is not None else ())]
        self._old.clear()
        await asyncio.gather(*(generation.channel.close(grace) for generation in generations), *self._closing)

    async def __aenter__(self) -> "InsideChannel":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def _generation(self) -> _Generation:
        newest = self._newest
        if newest is not None and (self._is_closed or newest.number == self._credentials.generation):
            return newest  # a closed channel reports it itself
        if newest is not None:
            newest.is_old = True
            self._old.add(newest)
            self._close_if_idle(newest)
        self._newest = _Generation(self._real(), self._credentials.generation)
        return self._newest

    def _real(self) -> grpc.aio.Channel:
        options: list[tuple[str, Any]] = channel_options()
        if not self._credentials.is_encrypted:
            return grpc.aio.insecure_channel(self._address, options=options)
        # The name of the role, on any address; only the authority issues certificates for it.
        options.append(("grpc.ssl_target_name_override", server_name(self._credentials.identity.cluster, self._role)))
        return grpc.aio.secure_channel(self._address, self._credentials.channel_credentials(), options=options)

    def _show(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that identify this process where TLS does not."""
        if self._credentials.is_encrypted:
            return ()
        if self._proof_validity.left_s <= 0 or self._proof_generation != self._credentials.generation:
            self._proof_validity = Validity.from_now(_RENEW_PROOF_S)
            signer = self._credentials.held.signer
            audience = audience_of(self._role, self._address)
            self._proof = ((METADATA_KEY, signer.sign({}, audience=audience, lifetime_s=PROOF_LIFETIME_S)),)
            self._proof_generation = self._credentials.generation
        return self._proof

    def _ended(self, generation: _Generation) -> None:
        generation.num_calls -= 1
        if generation.is_old:
            self._close_if_idle(generation)

    def _close_if_idle(self, generation: _Generation) -> None:
        if generation.num_calls == 0 and generation in self._old:
            self._old.discard(generation)
            task = asyncio.get_running_loop().create_task(generation.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Factories of channels and tickets."""

    worker: Connect
    """Makes a channel to a worker's control or KV plane."""
    router: Connect
    """Makes a channel to a router's administration."""
    issue: IssueTicket
    """Signs tickets; workers accept those of routers for placed requests, and of the controller for moving caches."""
    direct_name: str = ""
    """DNS name in the certificates of workers' direct doors; empty if they name hosts, or without TLS."""

    @classmethod
    def of(cls, credentials: Credentials, *, has_own_files: bool = False) -> "Reach":
        """Return the access of the holder of these credentials.

        `has_own_files`: doors show the operator's certificate instead of the cluster's.
        """
        is_issued = credentials.is_encrypted and not has_own_files
        return cls(
            direct_name=server_name(credentials.identity.cluster, Role.WORKER) if is_issued else "",
            worker=connect_to(Role.WORKER, credentials),
            router=connect_to(Role.ROUTER, credentials),
            issue=issuer(lambda: credentials.held.signer),
        )
