"""The log of the latest decisions and their outcomes.

A decision is logged when its plan is booked. The attempt that runs the plan notes in it what the workers really found
and how long they really took; when the attempt ends, listeners compare that with the prediction. The log is bounded;
each entry is a plan and the few scores and loads that explain it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from common.errors import Cancelled
from common.ids import RequestId
from common.wire_names import PlanKind
from kvrelay.v1 import inference_pb2 as pb
from router.placement.answer_pool import AnswerPool
from router.placement.calibration import DurationForecast
from router.placement.plans import Plan, PlanCandidate, kind_of
from router.placement.waits import NO_WAITS, Waits

CAPACITY = 1000
COMPLETED = "completed"


@dataclass(slots=True, eq=False, kw_only=True)
class DecisionRecord:
    """One booked plan and its outcome; None means not known (yet). Event loop only."""

    request_id: RequestId
    tenant: str
    """Owner of the request; no other tenant may see the decision."""
    num_tokens: int
    """Tokens that must be in the KV cache."""
    plan: Plan
    decided_s: float
    """Time of the choice on the router's clock."""
    decision_s: float = 0.0
    """Duration of the choice."""
    waited_s: float = 0.0
    """Time from the receipt of the request to the choice."""
    waits: Waits = NO_WAITS
    """Parts of that in line, by what the request waited for."""
    line_forecast: DurationForecast | None = None
    """Time from receipt to the first token, as forecast when the request entered the line; None: it never waited."""
    ttft_forecast: DurationForecast | None = None
    """Time from receipt to the first token, as forecast at the choice."""
    tpot_forecast: DurationForecast | None = None
    """Mean gap between tokens, as forecast at the choice."""
    attempt: int = 0
    num_hashed_blocks: int = 0
    """Full blocks that caches may hold; 0 for a request that no cache serves."""
    num_held_blocks: int = 0
    """Leading blocks that the worker which computes held, of use to the request or not, as it had reported."""
    num_evicted_blocks: int = 0
    """Blocks behind the longest cached prefix that caches held before and have evicted."""
    num_read_ahead_blocks: int = 0
    """Blocks that a worker of the plan has read from its tiers while the request waited."""
    num_cached_tokens: int | None = None
    """Tokens found in the cache, pulled ones included."""
    ttft_s: float | None = None
    """Time from the choice to the first token."""
    tpot_s: float | None = None
    """Mean gap between tokens of the first sample in this attempt."""
    num_drafted_tokens: int = 0
    """Draft tokens that its steps have verified."""
    num_accepted_tokens: int = 0
    num_pinned_tokens: int = 0
    """Leading tokens that the marks of the request have pinned."""
    num_refused_pin_tokens: int = 0
    """Tokens that they could not pin."""
    ended: str = ""
    """Empty while the attempt runs; then "completed", "moved" when its worker was leaving, "set back" when its room
    went to another tenant, or an error's class."""


class DecisionLog:
    """A ring of decisions. Event loop only."""

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._decisions: deque[DecisionRecord] = deque(maxlen=capacity)
        self._listeners: list[Callable[[DecisionRecord], None]] = []

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decision: DecisionRecord) -> None:
        """Log a decision; the oldest one is dropped."""
        self._decisions.append(decision)

    def subscribe(self, listener: Callable[[DecisionRecord], None]) -> None:
        """Call `listener` with every decision whose attempt has ended."""
        self._listeners.append(listener)

    @contextmanager
    def following(self, decision: DecisionRecord, *, attempt: int) -> Iterator[None]:
        """Run an attempt inside the block and note how it ends, unless the attempt has noted that itself."""
        decision.attempt = attempt
        ended = COMPLETED
        try:
            yield
        except asyncio.CancelledError:
            ended = Cancelled.__name__
            raise
        except BaseException as error:
            ended = type(error).__name__
            raise
        finally:
            decision.ended = decision.ended or ended
            for listener in self._listeners:
                listener(decision)

    def newest(self, limit: int) -> list[DecisionRecord]:
        """Return the latest decisions of all tenants, newest first; for operators."""
        return list(islice(reversed(self._decisions), limit))

    def latest(self, *, tenant: str, limit: int, request_id: RequestId | None = None) -> list[DecisionRecord]:
        """Return the tenant's latest decisions, of one request or of all, newest first."""
        found: list[DecisionRecord] = []
        for decision in reversed(self._decisions):
            if len(found) == limit:
                break
            if decision.tenant == tenant and request_id in (None, decision.request_id):
                found.append(decision)
        return found


_KINDS = {
    PlanKind.REMOTE: pb.PLAN_KIND_REMOTE,
    PlanKind.LOCAL: pb.PLAN_KIND_LOCAL,
    PlanKind.PREFILL: pb.PLAN_KIND_PREFILL,
}


def forecast_to_proto(forecast: DurationForecast | None) -> pb.Forecast | None:
    """Return the message of a forecast."""
    if forecast is None:
        return None
    return pb.Forecast(expected_s=forecast.expected_s, low_s=forecast.low_s, high_s=forecast.high_s)


def plan_to_proto(decision: DecisionRecord, *, attempt: int) -> pb.PlanChosen:
    """Return the part of a decision that its client sees."""
    plan = decision.plan
    prefill, decode = shown_workers(plan, plan)
    return pb.PlanChosen(
        kind=_KINDS[plan.kind],
        prefill_worker_id=prefill,
        decode_worker_id=decode,
        predicted_cached_tokens=plan.predicted_cached_tokens,
        reason=plan.reason,
        attempt=attempt,
        source_worker_id="" if plan.pull is None else plan.pull.source,
        num_source_blocks=0 if plan.pull is None else plan.pull.num_blocks,
        predicted_ttft_s=plan.predicted_ttft_s or 0.0,
        predicted_tpot_s=plan.predicted_tpot_s or 0.0,
        ttft_forecast=forecast_to_proto(decision.ttft_forecast),
        line_ttft_forecast=forecast_to_proto(decision.line_forecast),
        tpot_forecast=forecast_to_proto(decision.tpot_forecast),
    )


def explain(decisions: Iterable[DecisionRecord], *, policy: str, now_s: float) -> pb.ExplainResponse:
    """Return the decisions with all options that were compared."""
    return pb.ExplainResponse(decisions=[explain_one(decision, policy, now_s) for decision in decisions])


def explain_one(decision: DecisionRecord, policy: str, now_s: float) -> pb.Decision:
    """Return a decision with all options that were compared."""
    plan = decision.plan
    return pb.Decision(
        request_id=decision.request_id,
        attempt=decision.attempt,
        age_s=now_s - decision.decided_s,
        policy=policy,
        num_tokens=decision.num_tokens,
        plan=plan_to_proto(decision, attempt=decision.attempt),
        candidates=[_candidate(candidate, plan) for candidate in plan.candidates()],
        num_candidates=plan.num_candidates,
        decision_s=decision.decision_s,
        waited_s=decision.waited_s,
        outcome=pb.DecisionOutcome(
            num_cached_tokens=decision.num_cached_tokens,
            ttft_s=decision.ttft_s,
            tpot_s=decision.tpot_s,
            ended=decision.ended,
            num_drafted_tokens=decision.num_drafted_tokens,
            num_accepted_tokens=decision.num_accepted_tokens,
            num_pinned_tokens=decision.num_pinned_tokens,
            num_refused_pin_tokens=decision.num_refused_pin_tokens,
        ),
    )


def shown_workers(option: Plan | PlanCandidate, plan: Plan) -> tuple[str, str]:
    """Return the prefill and the decode worker of a plan, or of an option beside it, as clients see them."""
    return (option.answering, "") if plan.pool is AnswerPool.PREFILL else (option.prefill or "", option.answering)


def _candidate(candidate: PlanCandidate, plan: Plan) -> pb.Candidate:
    prefill, decode = shown_workers(candidate, plan)
    return pb.Candidate(
        kind=_KINDS[plan.kind if plan.pool is AnswerPool.PREFILL else kind_of(candidate.prefill)],
        prefill_worker_id=prefill,
        decode_worker_id=decode,
        source_worker_id=candidate.source or "",
        cost=candidate.cost,
        terms=candidate.terms,
    )
