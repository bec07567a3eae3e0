"""Traces of requests at the router: which ones are sampled, and the spans that they make at their end.

    chat MODEL                          the request, from its receipt to its terminal reply
    ├── door · tokenize · line          what comes before the first plan; `line` again before each further one
    ├── choice                          one event for each option that was compared, with its cost and the cost's parts
    └── attempt                         one for each plan; linked to the one before it of the same samples
        ├── reserving · prefilling · handoff · decoding       states of the life cycle
        └── prefill, decode             recorded by the workers, which get the attempt's place with their calls

Every time is a stamp that exists anyway, of the life cycle, the decision or the ledger, but for the stages of the door,
which are stamped where a request is sampled. The door decides which requests are sampled, `tracing.sample_rate` of all.
A client's `traceparent` is continued, but its wish to be sampled counts only within `tracing.client_traces_per_min` of
its tenant: traces cost the operator, not the client.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.clock import Clock
from common.config import TracingConfig
from common.ids import RequestId
from common.lifecycle import LifeCycle, State
from common.tracing import (
    NO_STAGES,
    NO_TRACER,
    Attributes,
    Event,
    Span,
    SpanContext,
    Stages,
    StampedStages,
    Tracer,
    Value,
    named,
    parse_traceparent,
)
from router.fleet.decisions import DecisionRecord, shown_workers
from router.placement.limits import TokenBucket
from router.placement.plans import PlanCandidate
from router.record.record import RunningRequest
from router.tenants import Tenant

MAX_OPTIONS = 8
"""Options of a choice that are shown."""
MAX_ATTEMPTS = 32
"""Attempts of a request that are shown: it may move any number of times."""
_ATTEMPT = "attempt"


@dataclass(slots=True, eq=False, kw_only=True)
class _RequestTrace:
    """Record of a sampled request until its end."""

    context: SpanContext
    parent: SpanContext | None
    tenant: str
    stages: StampedStages
    record: RunningRequest | None = None
    """None until it has passed every check."""
    num_attempts: int = 0
    line_end_s: float | None = None
    """End of the door's last stage, the first line; None until a plan is chosen."""
    last_attempts: dict[LifeCycle, Span] = field(default_factory=dict)
    """The last attempt of each life cycle: samples that are served separately have their own."""
    spans: list[Span] = field(default_factory=list)
    """Spans of its choices and attempts."""

    def attempt_before(self, life: LifeCycle) -> Span | None:
        """Return the last attempt of the same samples; the first one that they have alone follows a shared one."""
        ended = (each for each in reversed(self.spans) if each.name == _ATTEMPT and each.end_s <= life.received_s)
        return self.last_attempts.get(life) or next(ended, None)


class RequestTraces:
    """The sampled requests of a router; none before `record_to`. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tracer = NO_TRACER
        self._config = TracingConfig()
        self._random = random.Random()
        self._open: dict[RequestId, _RequestTrace] = {}
        self._buckets: dict[str, TokenBucket] = {}

    def record_to(self, tracer: Tracer, config: TracingConfig) -> None:
        """Sample requests from now on as `config` says, and record their spans."""
        self._tracer, self._config = tracer, config

    def begin(self, life: LifeCycle, tenant: Tenant, traceparent: str) -> Stages:
        """Decide whether a request is sampled, and return the stages that its door passes."""
        if self._tracer is NO_TRACER:
            return NO_STAGES
        parent = parse_traceparent(traceparent)
        asked = parent is not None and parent.is_sampled and self._allows(tenant)
        if not asked and self._random.random() >= self._config.sample_rate:
            return NO_STAGES
        context = SpanContext.root() if parent is None else parent.child()
        stages = StampedStages(self._clock, begun_s=life.received_s)
        stages.enter("door")
        self._open[life.request_id] = _RequestTrace(context=context, parent=parent, tenant=tenant.name, stages=stages)
        return stages

    def _allows(self, tenant: Tenant) -> bool:
        """Return whether a client of a tenant may have one more of its requests traced, which is then counted."""
        per_min, now_s = self._config.client_traces_per_min, self._clock.monotonic()
        if not per_min:
            return False
        bucket = self._buckets.setdefault(tenant.name, TokenBucket(per_min=per_min, now_s=now_s))
        if bucket.wait_s(1.0, now_s):
            return False
        bucket.take(1.0, now_s)
        return True

    def follow(self, record: RunningRequest) -> None:
        """Note the record of a request that runs now."""
        if (trace := self._open.get(record.job.request_id)) is not None:
            trace.record = record

    def exemplar(self, request_id: RequestId) -> dict[str, str] | None:
        """Return the labels by which a metric names a request's trace; None if the request is not sampled."""
        trace = self._open.get(request_id)
        return None if trace is None else {"trace_id": f"{trace.context.trace_id:032x}"}

    @contextmanager
    def attempt(self, life: LifeCycle, decision: DecisionRecord) -> Iterator[str]:
        """Trace an attempt inside the block, which ends with `decision.ended` set; yields its `traceparent` or ""."""
        trace = self._open.get(life.request_id)
        if trace is None or trace.num_attempts == MAX_ATTEMPTS:
            yield ""
            return
        trace.num_attempts += 1
        context, num_stamps, previous = trace.context.child(), len(life.stamps), trace.attempt_before(life)
        is_first = trace.line_end_s is None  # the door's stages end with the first line
        queued_s = trace.stages.entered_s if is_first else life.stamps[-1][1]
        # The duration of the choice ends a little after its stamp.
        chosen_s = max(queued_s, decision.decided_s - decision.decision_s)
        if is_first:
            trace.line_end_s = chosen_s
        try:
            yield context.traceparent
        finally:
            if not is_first:
                trace.spans.append(_line(trace, queued_s, chosen_s))
            trace.spans.append(_choice(trace, decision, chosen_s))
            stamps, end_s = life.stamps[num_stamps:], self._clock.monotonic()
            attempt = Span(
                name=_ATTEMPT,
                context=context,
                parent=trace.context,
                start_s=decision.decided_s,
                end_s=end_s,
                attributes=named(_attempt_attributes(decision)),
                links=() if previous is None else (previous.context,),
                error="" if decision.ended in ("completed", "moved", "set back") else decision.ended,
            )
            trace.last_attempts[life] = attempt
            trace.spans += [attempt, *_states(context, stamps, end_s)]

    def end(self, life: LifeCycle, outcome: str) -> None:
        """Record the spans of a request that has ended, if it was sampled."""
        trace = self._open.pop(life.request_id, None)
        if trace is None:
            return
        end_s = life.stamps[-1][1]
        before_s = end_s if trace.line_end_s is None else trace.line_end_s
        record = trace.record
        attributes: dict[str, Value] = {"gen_ai.response.id": life.request_id, "gen_ai.provider.name": "kvrelay"}
        attributes |= named({"outcome": outcome, "tenant": trace.tenant})
        events: list[Event] = []
        name = "request"
        if record is not None:
            name = f"{_operation(record)} {record.job.model.name}"
            attributes |= _request_attributes(record)
            if record.ledger.first_token_s is not None and record.job.embedding is None:
                events.append(Event(name="first token", at_s=record.ledger.first_token_s))
        request = Span(
            name=name,
            context=trace.context,
            parent=trace.parent,
            start_s=life.received_s,
            end_s=end_s,
            attributes=attributes,
            events=events,
            error="" if outcome == "completed" else outcome,
            is_server=True,
        )
        if trace.spans and life.stamps[-2][0] is State.QUEUED:  # it ended while it waited for one more plan
            trace.spans.append(_line(trace, life.stamps[-2][1], end_s))
        self._tracer.record([request, *trace.stages.spans(trace.context, before_s), *trace.spans])


def _line(trace: _RequestTrace, start_s: float, end_s: float) -> Span:
    return Span(name="line", context=trace.context.child(), parent=trace.context, start_s=start_s, end_s=end_s)


def _choice(trace: _RequestTrace, decision: DecisionRecord, chosen_s: float) -> Span:
    plan = decision.plan
    return Span(
        name="choice",
        context=trace.context.child(),
        parent=trace.context,
        start_s=chosen_s,
        end_s=decision.decided_s,
        attributes=named({"reason": plan.reason, "num_options": plan.num_candidates}),
        events=[_option(each, decision) for each in plan.candidates()[:MAX_OPTIONS]],
    )


def _option(candidate: PlanCandidate, decision: DecisionRecord) -> Event:
    prefill, decode = shown_workers(candidate, decision.plan)
    attributes: dict[str, Value] = {"prefill": prefill, "decode": decode, "source": candidate.source or ""}
    attributes |= {"cost": candidate.cost} | {f"cost.{term}": cost for term, cost in candidate.terms.items()}
    return Event(name="option", at_s=decision.decided_s, attributes=named(attributes))


def _states(parent: SpanContext, stamps: Sequence[tuple[State, float]], end_s: float) -> Iterator[Span]:
    """Yield a span for each state of the life cycle that an attempt went through; none if it failed before."""
    ends = [*(at_s for _, at_s in stamps[1:]), end_s]
    for (state, start_s), until_s in zip(stamps, ends, strict=False):
        if state is not State.QUEUED:
            yield Span(name=state.value, context=parent.child(), parent=parent, start_s=start_s, end_s=until_s)


def _attempt_attributes(decision: DecisionRecord) -> Attributes:
    plan = decision.plan
    prefill, decode = shown_workers(plan, plan)
    found: dict[str, Value | None] = {
        "attempt": decision.attempt,
        "plan": plan.kind.value,
        "prefill": prefill or None,
        "decode": decode or None,
        "source": None if plan.pull is None else plan.pull.source,
        "ended": decision.ended,
        "predicted_cached_tokens": plan.predicted_cached_tokens,
        "num_cached_tokens": decision.num_cached_tokens,
        "predicted_ttft_s": plan.predicted_ttft_s,
        "ttft_s": decision.ttft_s,
        "predicted_tpot_s": plan.predicted_tpot_s,
        "tpot_s": decision.tpot_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def _operation(record: RunningRequest) -> str:
    """Return the name of the operation by the conventions for generative AI."""
    if record.job.embedding is not None:
        return "embeddings"
    return "text_completion" if record.job.answer_format is None else "chat"


def _request_attributes(record: RunningRequest) -> Attributes:
    """Return the attributes that the conventions for generative AI define, and our own durations. No text."""
    job, sampling, timings = record.job, record.job.sampling, record.timings
    found: dict[str, Value] = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.request.model": job.model.name,
        "gen_ai.response.model": job.model.name,
        "gen_ai.usage.input_tokens": len(job.prompt_token_ids),
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
    }
    if job.embedding is None:
        found |= {
            "gen_ai.usage.output_tokens": record.ledger.num_tokens,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.choice.count": sampling.n,
        }
        if reasons := record.ledger.finish_reasons:
            found["gen_ai.response.finish_reasons"] = reasons
        if record.ledger.has_tokens:
            found["gen_ai.response.time_to_first_chunk"] = timings.ttft_s
    durations: dict[str, Value] = {
        "queue_s": timings.queue_s,
        "prefill_s": timings.prefill_s,
        "transfer_s": timings.transfer_s,
        "transfer_exposed_s": timings.transfer_exposed_s,
        "tpot_s": timings.tpot_s,
        "max_itl_s": timings.max_itl_s,
        "num_attempts": record.num_attempts,
        "num_pulled_tokens": record.num_pulled_tokens,
    }
    return found | named(durations)
