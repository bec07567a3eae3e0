"""Tenants: whose request it is, what they may use, and what keeps their KV apart."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant's share and limits; None: no limit of its own."""

    name: str
    weight: float = 1.0
    """Share of the fleet's work, relative to the other tenants that wait."""
    max_queued: int | None = None
    """Requests that wait for a plan."""
    max_concurrent: int | None = None
    """Requests with a plan; further ones wait."""
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    """Prompt and output together, cached ones included."""
    max_priority: int = 0
    """A request that claims more gets this."""
    is_operator: bool = False
    """Whether it may ask for the status of the whole cluster."""
    cache_salt: str = ""
    """Part of every block hash: equal exactly for tenants that share cached KV."""


ANYBODY = Tenant(name="default", is_operator=True)
"""Everybody, where nobody has to say who they are."""
