"""From an address to a target."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.errors import InvalidRequest
from loadtest.targets.interface import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What a generator process needs to know in order to reach a target."""

    url: str
    """`HOST:PORT` or `grpc://HOST:PORT`: our gRPC API. `http(s)://HOST[:PORT]/v1`: an OpenAI-compatible server."""
    api_key: str | None = None
    model: str | None = None
    """None: the first one that is served."""
    direct: bool = False
    """gRPC: tokens come straight from the decode workers."""

    def to_wire(self) -> dict[str, Any]:
        """Return the fields, for msgpack or JSON."""
        return asdict(self)

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> "TargetSpec":
        """Invert `to_wire`."""
        return cls(**fields)


def make_target(spec: TargetSpec) -> Target:
    """Return a target that is not connected yet. Belongs to the running event loop. Raises InvalidRequest."""
    raise InvalidRequest(f"target {spec.url!r} is neither HOST:PORT, grpc://HOST:PORT nor http(s)://HOST[:PORT]/v1")
