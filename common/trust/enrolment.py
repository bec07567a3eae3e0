"""What a process and the authority exchange: a request for a certificate, and the certificate.

It travels over what the launcher has to the process anyway, its standard streams or an actor call, which nobody else
can use. Private keys never travel.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


class _Record:
    """To and from a line of JSON."""

    __slots__ = ()

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Invert `to_json`. Raises ValueError."""
        try:
            entry: Any = json.loads(text)
        except RecursionError as error:
            raise ValueError(f"not a {cls.__name__}: it is too deep") from error
        kinds = {field.name: _KINDS[field.type] for field in fields(cls)}  # type: ignore[arg-type]
        if not isinstance(entry, dict) or set(entry) != set(kinds):
            raise ValueError(f"not a {cls.__name__}")
        if wrong := [name for name, is_right in kinds.items() if not is_right(entry[name])]:
            raise ValueError(f"not a {cls.__name__}: {wrong[0]} has another type")
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS: Mapping[Any, Callable[[object], bool]] = {
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    float: _is_number,
    tuple[str, ...]: lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
}
"""Whether a value of JSON fits a field, by the field's type."""


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
