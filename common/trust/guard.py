"""Interceptor in front of every handler of a listener: identifies the caller and enforces the rights of its role.

Inside listeners identify a caller by the certificate of its TLS connection, or without TLS by the proof in its metadata
(`proofs.py`). At a door every client may call the methods for clients.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc

from common.errors import AccessDenied, KvrelayError, Unauthenticated
from common.ports import address_of, is_loopback, listening_address
from common.rpc import abort, rebuilt
from common.trust.access import METHODS, Audience, allowed_roles
from common.trust.anonymous import AnonymousCalls
from common.trust.credentials import Credentials
from common.trust.doors import DoorCertificates
from common.trust.identity import Identity, Role
from common.trust.proofs import METADATA_KEY, audience_of, expiry_of, identity_among

logger = logging.getLogger(__name__)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Behavior: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
Screen: TypeAlias = Callable[[str, Any], None]
"""Checks a call by its method's full name and its metadata. Raises KvrelayError for an unknown caller."""
_caller: ContextVar[Identity] = ContextVar("caller")


def caller() -> Identity:
    """Return the caller that the running task serves, on an inside listener. Raises LookupError elsewhere."""
    return _caller.get()


class Guard(grpc.aio.ServerInterceptor):
    """Guards one listener of a process. Event loop only."""

    def __init__(
        self,
        credentials: Credentials,
        audience: Audience,
        *,
        door: DoorCertificates | None = None,
        screen: Screen | None = None,
    ) -> None:
        """Guard a listener of `audience`.

        `door`: certificates of a listener for clients, instead of the process's own. `screen`: check of calls of our
        own methods there, before any request is read.
        """
        self._screen = screen
        self._anonymous = AnonymousCalls()
        self._credentials = credentials
        self.audience = audience
        self._door = door
        self._proof_audience = ""

    def listen(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Add a port to a server and return it; 0 takes any. Raises OSError, RuntimeError."""
        credentials, address = self._credentials, address_of(listening_address(host), port)
        if credentials.is_encrypted:
            bound: int = server.add_secure_port(address, self._server_credentials())
        else:
            if not (credentials.held.enrolment.allows_plain_text or is_loopback(host)):
                raise OSError(
                    f"cannot listen on {address_of(host, port)} without TLS: other hosts could read along;"
                    " set tls.mode: auto, or tls.insecure: true where the network is private"
                )
            bound = server.add_insecure_port(address)
        self._proof_audience = audience_of(credentials.identity.role, address_of(host, bound))
        return bound

    def _server_credentials(self) -> grpc.ServerCredentials:
        if self.audience is Audience.CLIENTS and self._door is not None:
            return self._door.server_credentials()
        return self._credentials.server_credentials(ask_for_certificate=self.audience is Audience.INSIDERS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler with a check of the caller in front, a refusing handler, or None for unknown methods."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        roles = allowed_roles(method, self.audience)
        if Role.CLIENT in roles:
            return self._let_in(handler, handler_call_details)
        if not roles:
            return _refusal(handler, AccessDenied(f"cannot call {method}: no role may call it on this listener"))
        if self._credentials.is_encrypted:
            return _checked(handler, lambda context: _admit(self._by_certificate(context), roles, method))
        try:
            identity = _admit(self._by_proof(handler_call_details.invocation_metadata), roles, method)
        except KvrelayError as error:
            return _refusal(handler, error)
        return _checked(handler, lambda _context: identity)

    def _let_in(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call at a door."""
        if call.method not in METHODS:
            return self._anonymous.bounded(handler)
        if self._screen is None:  # the request itself carries the caller's right
            return self._anonymous.read(handler)
        try:
            self._screen(call.method, call.invocation_metadata)
        except KvrelayError as error:
            return _refusal(handler, error)
        return handler

    def _by_certificate(self, context: Any) -> Identity:
        shown = context.auth_context()
        names = shown.get("x509_subject_alternative_name", ())
        try:
            # A connection may outlive the certificate of its handshake.
            if any(expiry_of(pem) <= time.time() for pem in shown.get("x509_pem_cert", (b"",))):
                raise Unauthenticated("the certificate has expired; renewed ones count on new connections")
            return identity_among([name.decode() for name in names], cluster=self._credentials.identity.cluster)
        except ValueError as error:
            raise Unauthenticated(f"the certificate is not valid: {error}") from error

    def _by_proof(self, metadata: Any) -> Identity:
        proof = next((value for key, value in metadata or () if key == METADATA_KEY), None)
        if not isinstance(proof, str):
            raise Unauthenticated(f"no proof of identity: only processes of this cluster may call ({METADATA_KEY})")
        return self._credentials.held.verifier.identify(proof, audience=self._proof_audience)


def _admit(identity: Identity, roles: frozenset[Role], method: str) -> Identity:
    if identity.role not in roles:
        logger.warning("refused", extra={"method": method, "caller": identity.uri})
        raise AccessDenied(f"cannot call {method}: a {identity.role} may not")
    return identity


def _checked(handler: Any, check: Callable[[Any], Identity]) -> Any:
    """Return a handler that runs the same behavior after `check` has returned the caller."""

    def behind(behavior: _Behavior) -> _Behavior:
        async def handle(request: Any, context: Any) -> Any:
            try:
                identity = check(context)
            except KvrelayError as error:
                await abort(context, error)
            _caller.set(identity)
            return await behavior(request, context)

        return handle

    return rebuilt(handler, behind, handler.request_deserializer)


def _refusal(handler: Any, error: KvrelayError) -> Any:
    """Return a handler that ends every call with an error and reads nothing: all kinds look alike on the wire.

    A handler for a single request would run only after the request, so a refused caller could make us buffer half of
    it.
    """

    async def handle(_requests: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(handle, None, handler.response_serializer)
