"""Tenants: their shares and limits, and the salts that keep their KV apart."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Share and limits of one tenant; None: no limit of its own."""

    name: str
    weight: float = 1.0
    """Share of the fleet's work relative to the other waiting tenants."""
    max_queued: int | None = None
    """Requests that wait for a plan."""
    max_concurrent: int | None = None
    """Requests with a plan; further ones wait."""
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    """Prompt and output together, cached ones included."""
    max_priority: int = 0
    """Highest priority; a request that claims more gets this one."""
    is_operator: bool = False
    """Whether it may ask for the status of the whole cluster."""
    cache_salt: str = ""
    """Part of every block hash: equal exactly for tenants that share cached KV."""


ANYBODY = Tenant(name="default", is_operator=True)
"""The tenant of all callers when there is no authentication."""
