"""Tenants: their shares and limits, the salts that keep their KV apart, and the terms that their requests claim."""

import enum
import math
from dataclasses import dataclass

from common.errors import InvalidRequest
from kvrelay.v1 import inference_pb2


class Overload(enum.Enum):
    """How requests are treated that have missed their objective for the first token, or are predicted to."""

    REFUSE = "refuse"
    """Refused at once."""
    WAIT = "wait"
    """Served when their turn comes, until their own deadline."""
    SHORTEN = "shorten"
    """Served with a shorter answer."""
    YIELD = "yield"
    """Served after the requests of all tenants."""


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
    cache_gib: float = 0.0
    """Most KV that its marks may pin on each worker."""
    max_priority: int = 0
    """Highest priority; a request that claims more gets this one."""
    overload: Overload | None = None
    """Treatment of late requests; None: as the router's `shed` says."""
    shortened_max_tokens: int = 128
    """Longest answer of a request that SHORTEN concerns."""
    is_operator: bool = False
    """Whether it may ask for the status of the whole cluster, and let it forget cached blocks."""
    cache_salt: str = ""
    """Part of every block hash: equal exactly for tenants that share cached KV."""

    @property
    def cache_bytes(self) -> int:
        """Most bytes of KV that its marks may pin on each worker."""
        return int(self.cache_gib * (1 << 30))


ANYBODY = Tenant(name="default", is_operator=True)
"""The tenant of all callers when there is no authentication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Priority and objectives of a request."""

    priority: int = 0
    ttft_slo_s: float = math.inf
    ttft_tokens: float = math.inf
    """Prompt length beyond which the first token may take proportionally longer."""
    tpot_slo_s: float = math.inf

    def ttft_objective_s(self, num_prompt_tokens: int) -> float:
        """Return the objective for the first token of a prompt of this size."""
        return self.ttft_slo_s * max(1.0, num_prompt_tokens / self.ttft_tokens)


NO_TERMS = Terms()
MAX_SALT_CHARS = 256
"""Longest salt of a request."""


def read_terms(
    message: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest, *, tenant: Tenant, default: Terms
) -> Terms:
    """Return the terms of the request, completed by the defaults. Raises InvalidRequest."""
    objective = message.objective
    has_own = objective.HasField("ttft_s")
    return Terms(
        priority=min(message.priority, tenant.max_priority),
        ttft_slo_s=_seconds(objective.ttft_s, "ttft_s") if has_own else default.ttft_slo_s,
        ttft_tokens=math.inf if has_own else default.ttft_tokens,
        tpot_slo_s=_seconds(objective.tpot_s, "tpot_s") if objective.HasField("tpot_s") else default.tpot_slo_s,
    )


def read_salt(
    message: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest | inference_pb2.ForgetTenantRequest,
    *,
    tenant: Tenant,
) -> str:
    """Return the salt of a request's blocks: its tenant's, and its own within that. Raises InvalidRequest."""
    own = message.cache_salt
    if len(own) > MAX_SALT_CHARS:
        raise InvalidRequest(f"{len(own)} characters; at most {MAX_SALT_CHARS} are taken", field="cache_salt")
    return f"{tenant.cache_salt}\0{own}" if own else tenant.cache_salt


def _seconds(value: float, name: str) -> float:
    if not value > 0:
        raise InvalidRequest(f"{value} is not a positive number of seconds", field=f"objective.{name}")
    return value
