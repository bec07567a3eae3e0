"""What a process and the authority exchange: a request for a certificate, and the certificate.

It travels over what the launcher has to the process anyway, its standard streams or an actor call, which nobody else
can use. Private keys never travel.
"""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError


class _Record:
    """A record that travels as a line of JSON."""

    __slots__ = ()
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Invert `to_json`. Raises ValueError, which names what is missing, unknown or of another type."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]  # the input may hold the block key
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"not a valid {cls.__name__}: {where}: {first['msg']}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentRequest(_Record):
    """A process asks for a certificate."""

    csr_pem: str
    """Certificate signing request; only its public key counts."""
    hosts: tuple[str, ...]
    """Addresses and DNS names by which a router's doors are reached; empty for anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment(_Record):
    """The authority's answer."""

    identity_uri: str
    certificate_pem: str
    ca_pem: str
    """Certificate of the authority, by which others are known."""
    lifetime_s: float
    """What is left of the certificate's life, from now on."""
    is_encrypted: bool
    """Whether this cluster's connections are TLS."""
    allows_plain_text: bool
    """Whether listeners that others than this host reach may do without TLS."""
    block_key: str
    """What block hashes are keyed with, hexadecimal; for routers only, else empty."""
