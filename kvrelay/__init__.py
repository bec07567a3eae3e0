"""kvrelay: disaggregated serving of large language models. `Client` and `AsyncClient` talk to a cluster."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    """Import the clients on first use: `import kvrelay.v1` alone must stay cheap."""
    if name in __all__:
        from kvrelay import client

        return getattr(client, name)
    raise AttributeError(f"module 'kvrelay' has no attribute {name!r}")
