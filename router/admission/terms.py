"""Priority and objectives that a client claims for a request, checked against the limits of its tenant."""

import math
from dataclasses import dataclass

from common.errors import InvalidRequest
from kvrelay.v1 import inference_pb2
from router.tenants import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Priority and objectives of a request."""

    priority: int = 0
    ttft_slo_s: float = math.inf
    ttft_tokens: float = math.inf
    """Prompt length beyond which the first token may take proportionally longer."""
    itl_slo_s: float = math.inf

    def ttft_objective_s(self, num_prompt_tokens: int) -> float:
        """Return the objective for the first token of a prompt of this size."""
        return self.ttft_slo_s * max(1.0, num_prompt_tokens / self.ttft_tokens)


NO_TERMS = Terms()


def read_terms(message: inference_pb2.GenerateRequest, *, tenant: Tenant, default: Terms) -> Terms:
    """Return the terms of the request, completed by the defaults. Raises InvalidRequest."""
    objective = message.objective
    has_own = objective.HasField("ttft_s")
    return Terms(
        priority=min(message.priority, tenant.max_priority),
        ttft_slo_s=_seconds(objective.ttft_s, "ttft_s") if has_own else default.ttft_slo_s,
        ttft_tokens=math.inf if has_own else default.ttft_tokens,
        itl_slo_s=_seconds(objective.itl_s, "itl_s") if objective.HasField("itl_s") else default.itl_slo_s,
    )


def _seconds(value: float, name: str) -> float:
    if not value > 0:
        raise InvalidRequest(f"{value} is not a positive number of seconds", field=f"objective.{name}")
    return value
