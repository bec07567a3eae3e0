"""Inspects the certificate that a listener shows: its issuer and its expiry. Does not verify it."""

import asyncio
import ssl
from dataclasses import dataclass

from cryptography import x509

from common.trust.credentials import Credentials
from common.trust.doors import show
from common.trust.identity import SCHEME

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCertificate:
    """Certificate of a listener."""

    expires_unix_s: float
    is_issued: bool
    """Whether a kvrelay cluster's authority issued it; otherwise it is the operator's own."""


class Onlooker:
    """Connects to listeners without sending data. Event loop only."""

    def __init__(self, credentials: Credentials) -> None:
        """Take `credentials` to show to inside listeners, so that they log no failure."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE  # expired certificates must be seen, too
        self._context.set_alpn_protocols(["h2"])
        show(self._context, credentials)

    async def look_at(self, address: str) -> ShownCertificate | None:
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
