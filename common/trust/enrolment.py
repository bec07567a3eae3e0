"""Messages between a process and the authority: a request for a certificate, and the certificate.

They travel over the launcher's existing private channel to the process: its standard streams, or actor calls. Private
keys never travel.
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
        """Invert `to_json`. Raises ValueError, naming a field that is missing, unknown or of another type."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]  # the input may hold the block key
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"not a valid {cls.__name__}: {where}: {first['msg']}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentRequest(_Record):
    """Request of a process for a certificate."""

    csr_pem: str
    """Certificate signing request; only its public key counts."""
    hosts: tuple[str, ...]
    """Addresses and DNS names of a router's doors; empty for other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment(_Record):
    """Answer of the authority."""

    identity_uri: str
    certificate_pem: str
    ca_pem: str
    """Certificate of the authority, which verifies other processes."""
    lifetime_s: float
    """Life of the certificate, from now on."""
    is_encrypted: bool
    """Whether this cluster's connections use TLS."""
    allows_plain_text: bool
    """Whether listeners that other hosts reach may work without TLS."""
    block_key: str
    """Key of block hashes, hexadecimal; empty except for routers."""
