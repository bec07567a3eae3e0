"""Signed statements of a process as JSON Web Tokens (RFC 7519): proofs of a call, and tickets.

Each is signed with the key of the process's certificate (ES256) and carries the certificate (`x5c`, RFC 7515 section
4.1.6), so that any holder of the authority's certificate can verify it offline.

A *proof* states that its holder is calling one listener (`aud`); it travels in the metadata of calls without TLS.
"""

import base64
import datetime
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jwt
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification

from common.errors import Unauthenticated
from common.ports import is_address, is_loopback
from common.trust.identity import Identity, Role

METADATA_KEY = "kvrelay-proof"
PROOF_LIFETIME_S = 600.0
OPERATOR_AUDIENCE = "door"
"""Audience of an operator's proof at a router's door."""
_LEEWAY_S = 300.0
"""Tolerated difference between the clocks of hosts, as for certificates (authority.py)."""
_ALGORITHM = "ES256"
_MAX_CACHED = 1024
_MAX_TOKEN_CHARS = 6144
"""A certificate with the longest names fits (`authority.MAX_NAME_BYTES`)."""


def audience_of(role: Role, address: str) -> str:
    """Return the audience of proofs for a listener: the role of its process, the port, and for a worker the host.

    Workers of several hosts listen on the same ports, and a worker must not be able to replay at another one a proof
    that it received. Callers dial the one address on which a worker listens; a router's may be a wildcard.
    """
    host, _, port = address.removeprefix("dns:///").rpartition(":")
    if role is not Role.WORKER:
        return f"{role}:{port}"
    bare = host.strip("[]").lower()
    if is_address(bare):
        bare = ipaddress.ip_address(bare).compressed
    return f"{role}:{'loopback' if is_loopback(bare) else bare}:{port}"


class Signer:
    """Signs for one identity. Any thread."""

    def __init__(self, identity: Identity, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.identity = identity
        self._key = key
        der = certificate.public_bytes(serialization.Encoding.DER)
        self._headers = {"x5c": [base64.b64encode(der).decode()]}

    def sign(self, claims: Mapping[str, Any], *, audience: str, lifetime_s: float) -> str:
        """Return a token with `claims` for an audience, valid for `lifetime_s`."""
        now_s = int(time.time())
        standard = {"sub": self.identity.uri, "aud": audience, "iat": now_s, "exp": now_s + int(lifetime_s)}
        return jwt.encode({**claims, **standard}, self._key, algorithm=_ALGORITHM, headers=self._headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """Span of the wall clock in which something counts. Clocks are set: also back, before its begin."""

    begins_unix_s: float
    ends_unix_s: float

    @classmethod
    def of(cls, certificate: x509.Certificate) -> "Validity":
        """Return the span in which a certificate is valid."""
        return cls(
            begins_unix_s=certificate.not_valid_before_utc.timestamp(),
            ends_unix_s=certificate.not_valid_after_utc.timestamp(),
        )

    @classmethod
    def from_now(cls, length_s: float) -> "Validity":
        """Return a span that begins now."""
        now_s = time.time()
        return cls(begins_unix_s=now_s, ends_unix_s=now_s + length_s)

    @property
    def left_s(self) -> float:
        """Seconds until its end; 0 when the clock shows a time outside of it."""
        now_s = time.time()
        return max(0.0, self.ends_unix_s - now_s) if now_s >= self.begins_unix_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A verified certificate."""

    identity: Identity
    key: ec.EllipticCurvePublicKey
    validity: Validity


class ProofVerifier:
    """Checks tokens of the parties of one cluster. One thread at a time."""

    def __init__(self, ca: x509.Certificate, *, cluster: str) -> None:
        self._store = verification.Store([ca])
        self._cluster = cluster
        self._certificates: OrderedDict[str, _Known] = OrderedDict()
        self._proofs: OrderedDict[tuple[str, str], tuple[Identity, Validity]] = OrderedDict()

    def identify(self, token: str, *, audience: str) -> Identity:
        """Return the identity that a proof establishes. Raises Unauthenticated."""
        shown = self._proofs.get((token, audience))
        if shown is not None and shown[1].left_s > 0:
            return shown[0]
        known, claims = self._verify(token, audience=audience)
        ends_unix_s = min(int(claims["exp"]), known.validity.ends_unix_s)  # PyJWT also accepts a string of digits
        validity = Validity(begins_unix_s=time.time() - _LEEWAY_S, ends_unix_s=ends_unix_s)
        _remember(self._proofs, (token, audience), (known.identity, validity))
        return known.identity

    def verify(self, token: str, *, audience: str) -> tuple[Identity, dict[str, Any]]:
        """Return the signer and the claims of a token for this audience. Raises Unauthenticated."""
        known, claims = self._verify(token, audience=audience)
        return known.identity, claims

    def _verify(self, token: str, *, audience: str) -> tuple[_Known, dict[str, Any]]:
        if len(token) > _MAX_TOKEN_CHARS:
            raise Unauthenticated(f"the proof has {len(token)} characters; at most {_MAX_TOKEN_CHARS}")
        try:
            header = jwt.get_unverified_header(token)
            known = self._check_certificate(header["x5c"][0])
            claims: dict[str, Any] = jwt.decode(
                token,
                known.key,
                algorithms=[_ALGORITHM],
                audience=audience,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "sub", "aud"]},
            )
        except Exception as error:  # parsers raise many types for arbitrary bytes
            raise Unauthenticated(f"the proof is not valid: {type(error).__name__}") from error
        if claims["sub"] != known.identity.uri:
            raise Unauthenticated("the proof is not valid: its subject differs from its certificate")
        return known, claims

    def _check_certificate(self, encoded: str) -> _Known:
        """Return the verified content of a certificate. Raises ValueError."""
        known = self._certificates.get(encoded)
        if known is not None and known.validity.left_s > 0:
            return known
        certificate = x509.load_der_x509_certificate(base64.b64decode(encoded, validate=True))
        verifier = (
            verification.PolicyBuilder()
            .store(self._store)
            .time(datetime.datetime.now(datetime.UTC))
            .build_client_verifier()
        )
        try:
            verifier.verify(certificate, [])
        except (verification.VerificationError, InvalidSignature) as error:
            raise ValueError("its certificate is not of this cluster, or has expired") from error
        key = certificate.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("its certificate has a key of another kind")
        known = _Known(
            identity=identity_of(certificate, cluster=self._cluster),
            key=key,
            validity=Validity.of(certificate),
        )
        _remember(self._certificates, encoded, known)
        return known


@lru_cache(maxsize=_MAX_CACHED)
def expiry_of(certificate_pem: bytes) -> float:
    """Return the expiry of a certificate in Unix seconds. Raises ValueError if it cannot be parsed."""
    return x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc.timestamp()


def identity_of(certificate: x509.Certificate, *, cluster: str) -> Identity:
    """Return the identity in a certificate. Raises ValueError unless it is one party of this cluster."""
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return identity_among(extension.value.get_values_for_type(x509.UniformResourceIdentifier), cluster=cluster)


def identity_among(names: list[str], *, cluster: str) -> Identity:
    """Return the single identity among a certificate's names. Raises ValueError unless it belongs to this cluster."""
    uris = [name for name in names if "://" in name]
    if len(uris) != 1:
        raise ValueError(f"a certificate with {len(uris)} identities; it must have one")
    identity = Identity.parse(uris[0])
    if identity.cluster != cluster:
        raise ValueError(f"{identity.uri} is of another cluster")
    return identity


def _remember(cache: "OrderedDict[Any, Any]", key: object, value: object) -> None:
    cache[key] = value
    while len(cache) > _MAX_CACHED:
        cache.popitem(last=False)
