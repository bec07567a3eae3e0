"""The certificate of a door, for gRPC and for HTTP: the one that the cluster issues, or the operator's own files.

A renewed or replaced certificate takes effect from the next handshake on, without a restart. `CertificateInspector`
returns the one that a listener shows, without verifying it.
"""

import asyncio
import logging
import os
import ssl
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

from common.config import TlsConfig
from common.errors import AccessDenied
from common.metrics_server import ScrapeTls
from common.trust.credentials import Credentials
from common.trust.identity import SCHEME, Role
from common.trust.proofs import identity_among

logger = logging.getLogger(__name__)

_RETRY_S = 60.0


class DoorCertificates(ABC):
    """The certificate that a door shows its clients."""

    @property
    @abstractmethod
    def version(self) -> tuple[int, ...]:
        """Differs for every certificate."""

    @abstractmethod
    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server; every handshake takes the newest certificate."""

    @abstractmethod
    def refresh(self, context: ssl.SSLContext) -> None:
        """Give a context the newest certificate, for handshakes from now on. Raises OSError, ssl.SSLError."""

    def ssl_context(self) -> ssl.SSLContext:
        """Return a context for an HTTP server; `refresh` keeps it up to date. Raises OSError, ssl.SSLError."""
        context = _new_context()
        self.refresh(context)
        return context


class DoorContext:
    """TLS context of an HTTP server: each handshake takes the newest certificate. Event loop only."""

    def __init__(self, door: DoorCertificates) -> None:
        """Raise OSError, ssl.SSLError for an unusable certificate."""
        self._door = door
        self._version = self._tried = door.version
        self._context = door.ssl_context()

    def newest(self) -> ssl.SSLContext:
        """Return the context; keeps the old certificate while a new one cannot be used."""
        version = self._door.version
        if version != self._version:
            try:
                # A new context: a failed load would leave the present one without its key.
                self._context, self._version = self._door.ssl_context(), version
            except OSError as error:  # such as a pair of files of which only one has been replaced
                if version != self._tried:
                    logger.error("cannot use the new certificate of the HTTP door: %s", error)
            self._tried = version
        return self._context


class IssuedDoor(DoorCertificates):
    """A door with the certificate that the cluster issued to the process."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    @property
    def version(self) -> tuple[int, ...]:
        """Differs for every certificate."""
        return (self._credentials.generation,)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server."""
        return self._credentials.server_credentials(ask_for_certificate=False)

    def refresh(self, context: ssl.SSLContext) -> None:
        """Give a context the newest certificate."""
        show(context, self._credentials)


class FileDoor(DoorCertificates):
    """A door with the certificate in the operator's files."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Check the files; `certificate` is the chain, leaf first. Raises OSError, ssl.SSLError for unusable files."""
        self._certificate = certificate
        self._key = key
        self.ssl_context()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server; files that change are read at the next handshake."""
        known = self.version

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(self._key.read_bytes(), self._certificate.read_bytes())])

        def newest() -> Any:  # None for no change, which grpc's types do not have
            nonlocal known
            if (version := self.version) == known:
                return None
            try:
                self.ssl_context()  # half-written files must not replace usable ones
            except (OSError, ssl.SSLError):
                return None
            known = version
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), newest, require_client_authentication=False)

    def refresh(self, context: ssl.SSLContext) -> None:
        """Give a context the files' present content; files that do not fit each other leave it unchanged."""
        for each in (_new_context(), context):
            each.load_cert_chain(self._certificate, self._key)

    @property
    def version(self) -> tuple[int, ...]:
        """Modification times of the files."""
        try:
            return tuple(path.stat().st_mtime_ns for path in (self._certificate, self._key))
        except OSError:
            return ()


def show(context: ssl.SSLContext, credentials: Credentials) -> None:
    """Load a process's newest certificate into a context. Raises OSError."""
    held = credentials.held
    # OpenSSL reads only files. mkstemp makes one that only the owner may read; it is deleted at once.
    fd, path = tempfile.mkstemp()
    try:
        os.write(fd, held.key_pem + held.certificate_pem)
        context.load_cert_chain(path)
    finally:
        os.close(fd)
        Path(path).unlink()


def door_of(tls: TlsConfig, credentials: Credentials) -> DoorCertificates | None:
    """Return the certificates of a process's doors, None without TLS. Raises OSError, ssl.SSLError for bad files."""
    if not credentials.is_encrypted:
        return None
    if tls.certificate is not None and tls.key is not None:
        return FileDoor(tls.certificate, tls.key)
    return IssuedDoor(credentials)


def keep_fresh(credentials: Credentials, refresh: Callable[[], None]) -> None:
    """Run `refresh` after every renewal, and again a minute after each OSError (such as ssl.SSLError).

    A file that cannot be read or written must not fail the renewal itself. Renewals run on an event loop.
    """

    def renewed() -> None:
        try:
            refresh()
        except OSError as error:
            logger.error("a listener keeps its old certificate", extra={"reason": str(error), "retry_s": _RETRY_S})
            asyncio.get_running_loop().call_later(_RETRY_S, renewed)

    credentials.on_accept(renewed)


def scrape_tls(credentials: Credentials) -> ScrapeTls | None:
    """Return the encryption of metrics: mutual TLS with operators in an encrypted cluster, else None."""
    if not credentials.is_encrypted:
        return None
    context, door = _new_context(), IssuedDoor(credentials)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credentials.held.ca_pem.decode())
    door.refresh(context)
    keep_fresh(credentials, lambda: door.refresh(context))

    def check(connection: ssl.SSLSocket) -> None:
        shown: Any = connection.getpeercert()
        names = [str(value) for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
        identity = identity_among(names, cluster=credentials.identity.cluster)
        if identity.role is not Role.OPERATOR:
            raise AccessDenied(f"metrics are for operators, not for a {identity.role}")

    return ScrapeTls(context=context, check=check)


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCertificate:
    """Certificate of a listener."""

    expires_unix_s: float
    is_issued: bool
    """Whether a kvrelay cluster's authority issued it; otherwise it is the operator's own."""


class CertificateInspector:
    """Reads the certificates of listeners: connects without sending data. Event loop only."""

    def __init__(self, credentials: Credentials) -> None:
        """Take `credentials` to show to inside listeners, so that they log no failure."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE  # expired certificates must be seen, too
        self._context.set_alpn_protocols(["h2"])
        show(self._context, credentials)

    async def inspect(self, address: str) -> ShownCertificate | None:
        """Return the certificate of a listener (host:port), or None without TLS."""
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                _reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=self._context)
        except (OSError, TimeoutError):
            return None
        try:
            encoded = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        finally:
            writer.close()
        certificate = x509.load_der_x509_certificate(encoded)
        return ShownCertificate(
            expires_unix_s=certificate.not_valid_after_utc.timestamp(), is_issued=_is_issued(certificate)
        )


def _is_issued(certificate: x509.Certificate) -> bool:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return any(uri.startswith(SCHEME) for uri in names.get_values_for_type(x509.UniformResourceIdentifier))
