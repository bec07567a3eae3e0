"""Why a plan was chosen and where time is lost, as `Client.explain` and `Client.diagnose` return them.

Field names are those of the wire messages (proto/kvrelay/v1/inference.proto), which define each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from common.wire_names import PlanKind
from kvrelay.client.events import PlanChosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A figure as it is, and as it would be after a change."""

    change: str
    """"prefill_worker", "decode_worker" or "pages"."""
    figure: str
    """"prefill_wait_s", "decode_step_s" or "request_s"; means."""
    now: float
    expected: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of lost time, or one part of a request's time."""

    cause: str
    """Name of the cause; empty for a part of a request's time."""
    pool: str
    lost_s: float
    """Mean time that a request loses by it."""
    text: str
    changes: tuple[str, ...]
    """Changes that would help, with what each would bring."""
    predictions: tuple[Prediction, ...] = ()
    """The figures in those sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWalls:
    """Use of a pool's time in a window, in shares of the time that its workers have lived in it."""

    pool: str
    window_s: float
    covered_s: float
    busy: float
    """Time in steps."""
    memory: float
    """Least time for the steps' memory traffic; 0 where the device was not measured, as below."""
    compute: float
    link: float
    overhead: float
    """Time of steps beyond the bounds of memory and arithmetic, and between steps with work."""
    waiting: float
    """Time without work."""
    binds: str
    """The largest part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantWaits:
    """A tenant's requests in line, now and in a window."""

    tenant: str
    num_waiting: int
    """Requests that wait now."""
    longest_wait_s: float
    """Longest wait of these so far."""
    num_answered: int
    mean_wait_s: float
    """Wait in line of the answered ones, in the mean."""
    mostly_for: str
    """The cause of most of their waiting, all requests together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Causes of the time that the answers of the last minutes lost, or the parts of one request's time."""

    headline: str
    findings: tuple[Finding, ...]
    """Faults first, then what costs most."""
    walls: tuple[PoolWalls, ...] = ()
    """Use of each pool's time over the last 1, 5 and 60 minutes; none for one request."""
    waiting: str = ""
    """How many requests wait in line now, how long, and for what; empty when none waits."""
    tenants: tuple[TenantWaits, ...] = ()
    """Tenants whose requests wait or have waited, those with most that wait now first; at most five."""


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
    tpot_s: float | None
    """Mean gap between tokens."""
    ended: str | None
    """None while the attempt runs; then "completed" or the name of an error class."""
    num_drafted_tokens: int = 0
    """Draft tokens that its steps have verified."""
    num_accepted_tokens: int = 0
    """Draft tokens that were right."""
    num_pinned_tokens: int = 0
    """Leading tokens that the request's marks have pinned."""
    num_refused_pin_tokens: int = 0
    """Tokens of marked prefixes that could not be pinned."""


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
    waited_s: float
    """Time from the receipt of the request to the decision."""
    outcome: DecisionOutcome
