"""The router's decisions, as `Client.explain` returns them.

Field names are those of the wire messages (kvrelay/v1/inference.proto), which define each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.client.records import PlanChosen, PlanKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One option that was compared."""

    kind: PlanKind
    prefill_worker_id: str | None
    """None for a local plan."""
    decode_worker_id: str
    source_worker_id: str | None
    """Worker to pull a prefix from first; None without a pull."""
    cost: float
    """Quantity that the policy minimizes."""
    terms: Mapping[str, float]
    """The parts of the cost by name; seconds unless the name says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionOutcome:
    """Outcome of a decision. Unknown values are None."""

    num_cached_tokens: int | None
    """Prompt tokens found in the cache, pulled ones included."""
    ttft_s: float | None
    """Time from the choice to the first token."""
    mean_itl_s: float | None
    ended: str | None
    """None while the attempt runs; then "completed" or the name of an error class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision of the router."""

    request_id: str
    attempt: int
    age_s: float
    """Seconds since it was made."""
    policy: str
    num_tokens: int
    """Tokens that had to be in the KV cache."""
    plan: PlanChosen
    candidates: tuple[Candidate, ...]
    """The best options, the chosen one first; empty when the policy reports none."""
    num_candidates: int
    """Number of options."""
    decision_s: float
    """Duration of the decision."""
    outcome: DecisionOutcome
