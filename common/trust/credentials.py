"""Credentials of a process: key, certificate and authority, renewed while it runs.

    ABSENT ──request()──▶ (the launcher has it signed) ──accept()──▶ HELD ──request(), accept()──▶ HELD …

Servers use a renewed certificate from the next handshake on, channels of `InsideChannel` from the next call on.
Existing connections stay unchanged.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from common.trust.authority import RENEW_SHARE, Authority, private_pem
from common.trust.enrolment import Enrolment, EnrolmentRequest
from common.trust.identity import Identity, Role
from common.trust.proofs import ProofVerifier, Signer, Validity

LOOK_S = 1.0
"""Interval of looking at the wall clock: it is set, and goes on while a host is suspended, which sleep does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One certificate and its key."""

    enrolment: Enrolment
    key_pem: bytes
    signer: Signer
    verifier: ProofVerifier
    validity: Validity

    @property
    def certificate_pem(self) -> bytes:
        """The certificate in PEM."""
        return self.enrolment.certificate_pem.encode()

    @property
    def ca_pem(self) -> bytes:
        """The authority's certificate in PEM."""
        return self.enrolment.ca_pem.encode()


class Credentials:
    """Identity and keys of this process. Any thread may read; one thread at a time may renew."""

    def __init__(self) -> None:
        self._key: ec.EllipticCurvePrivateKey | None = None
        self._held: Held | None = None
        self.generation = 0
        """Number of certificates accepted so far."""
        self._accepted: list[Callable[[], None]] = []

    @classmethod
    def of(cls, authority: Authority, role: Role, name: str, hosts: Sequence[str] = ()) -> "Credentials":
        """Return credentials issued by an authority in this process."""
        credentials = cls()
        credentials.renew(partial(authority.enrol, role=role, name=name), hosts)
        return credentials

    def renew(self, enrol: Callable[[EnrolmentRequest], Enrolment], hosts: Sequence[str] = ()) -> None:
        """Request a new certificate and accept it."""
        self.accept(enrol(self.request(hosts)))

    def request(self, hosts: Sequence[str]) -> EnrolmentRequest:
        """Return a request for a certificate with a new key; `accept` has to follow."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        unsigned = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        signed = unsigned.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return EnrolmentRequest(csr_pem=signed.decode(), hosts=tuple(hosts))

    def accept(self, enrolment: Enrolment) -> None:
        """Accept the answer to the latest request. Raises ValueError for any other.

        Raises OSError, with the certificate accepted, when a callback of `on_accept` could not use it.
        """
        certificate = x509.load_pem_x509_certificate(enrolment.certificate_pem.encode())
        if self._key is None or certificate.public_key() != self._key.public_key():
            raise ValueError("cannot enrol: the certificate is not for the key that was sent")
        identity = Identity.parse(enrolment.identity_uri)
        ca = x509.load_pem_x509_certificate(enrolment.ca_pem.encode())
        self._held = Held(
            enrolment=enrolment,
            key_pem=private_pem(self._key),
            signer=Signer(identity, self._key, certificate),
            verifier=ProofVerifier(ca, cluster=identity.cluster),
            validity=Validity.of(certificate),
        )
        self._key = None
        self.generation += 1
        errors: list[OSError] = []
        for callback in self._accepted:  # all of them run, even if one fails
            try:
                callback()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def to_json(self) -> str:
        """Return the credentials, private key included."""
        held = self.held
        return json.dumps({"enrolment": held.enrolment.to_json(), "key_pem": held.key_pem.decode()})

    @classmethod
    def from_json(cls, text: str) -> "Credentials":
        """Invert `to_json`. Raises ValueError."""
        entry = json.loads(text)
        try:
            key = serialization.load_pem_private_key(str(entry["key_pem"]).encode(), password=None)
            enrolment = Enrolment.from_json(str(entry["enrolment"]))
        except (KeyError, TypeError) as error:
            raise ValueError("not credentials of a kvrelay cluster") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("not credentials of a kvrelay cluster")
        credentials = cls()
        credentials._key = key
        credentials.accept(enrolment)
        return credentials

    def on_accept(self, callback: Callable[[], None]) -> None:
        """Run `callback` after every renewal."""
        self._accepted.append(callback)

    @property
    def held(self) -> Held:
        """The newest certificate. Raises RuntimeError before there is one."""
        if self._held is None:
            raise RuntimeError("this process has not been enrolled: it is started by `kvrelay up`, not by hand")
        return self._held

    @property
    def identity(self) -> Identity:
        """Identity of this process."""
        return self.held.signer.identity

    @property
    def is_encrypted(self) -> bool:
        """Whether connections of this cluster use TLS."""
        return self.held.enrolment.is_encrypted

    @property
    def renewal_due_s(self) -> float:
        """Seconds until the certificate should be renewed; 0 also while it is not valid yet."""
        held = self.held
        return max(0.0, held.validity.left_s - (1 - RENEW_SHARE) * held.enrolment.lifetime_s)

    async def until_renewal(self) -> None:
        """Wait until the certificate should be renewed."""
        await sleep_while(lambda: self.renewal_due_s)

    # TLS.

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return TLS credentials for a client inside the cluster."""
        held = self.held
        return grpc.ssl_channel_credentials(held.ca_pem, held.key_pem, held.certificate_pem)

    def server_credentials(self, *, ask_for_certificate: bool) -> grpc.ServerCredentials:
        """Return TLS credentials for a server; every handshake takes the newest certificate."""
        used = 0

        def configuration() -> grpc.ServerCertificateConfiguration:
            nonlocal used
            used, held = self.generation, self.held
            roots = held.ca_pem if ask_for_certificate else None
            return grpc.ssl_server_certificate_configuration([(held.key_pem, held.certificate_pem)], roots)

        def newest() -> Any:  # None for no change, which grpc's types do not have
            return configuration() if self.generation != used else None

        return grpc.dynamic_ssl_server_credentials(
            configuration(), newest, require_client_authentication=ask_for_certificate
        )


async def sleep_while(left_s: Callable[[], float]) -> None:
    """Sleep while some time is left by the wall clock, even if it is set, or the host is suspended, meanwhile."""
    while (now_left_s := left_s()) > 0:  # noqa: ASYNC110 - no event reports a clock change
        await asyncio.sleep(min(now_left_s, LOOK_S))
